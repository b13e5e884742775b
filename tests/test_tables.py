"""Tables and lists of a run's rows."""

from dataclasses import replace

from experiments import tables
from experiments.results import Row, describe
from sandbox.kernels import OPS

ROW = Row(
    op="gather",
    variant="planted",
    kind="numpy",
    target="cpu",
    baseline=False,
    scaled="",
    bytes=1000,
    flops=0,
    reproduce="python -m experiments compare",
    status="WRONG",
    **describe(next(iter(OPS["gather"].cases("compare")))),
)


def test_numbers_are_short_and_keep_three_digits():
    shown = {0.0: "0", 1234.5: "1234", 12.345: "12.3", 1.2345: "1.23", 0.01234: "0.012"}
    assert {value: tables.number(value) for value in shown} == shown
    assert tables.number(float("inf")) == "inf"
    assert tables.number(None) == ""


def test_failures_that_differ_in_numbers_alone_are_one_line():
    message = "{} of 48 elements wrong (1.{}e+03 x the allowed error), first at ({}, 0): got {}"
    alike = [
        replace(ROW, case=f"case{i}", message=message.format(i, i, i, ("nan", "-0.5", "inf")[i]))
        for i in range(3)
    ]
    others = [
        replace(ROW, message="guard byte at offset 3 was overwritten"),
        replace(ROW, variant="another", message=alike[0].message),
        replace(ROW, status="ERROR", message="TypeError: cache is float32"),
        replace(ROW, status="ERROR", message="TypeError: cache is float16"),
        replace(ROW, status="PASSED"),
    ]
    said = tables.failures([*alike, *others])
    assert len(said) == 5
    assert said[
        0
    ] == f"WRONG gather planted on cpu, case0 and 2 more cases: {alike[0].message}\n" + (
        "  python -m experiments compare"
    )
    assert "and 1 more case: " in tables.failures(alike[1:])[0]
    assert not any(" more case" in line for line in said[1:])


def test_times_of_the_checked_build_are_marked():
    rows = [replace(ROW, target="host", checked=True), ROW]
    assert "checked build" in tables.title("gather", rows)
    assert tables.title("gather", rows[1:]) == "gather"
    assert "checked build" in tables.text_table("gather", rows)
    assert "checked build" in tables.markdown_table("gather", rows)
