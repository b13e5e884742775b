"""Tables and lists of a run's rows."""

from dataclasses import replace

from experiments import plots, report, tables
from experiments.results import Row, Timing, describe, with_times
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


def timed(flops, copy_us, gemm=800.0, **changes):
    """A row on a GPU that took 8 us."""
    row = replace(ROW, target="gpu", status="PASSED", error=0.0, flops=flops)
    row = replace(row, **changes)
    timing = Timing((8.0, 8.0), 8, 4, "cold", "graph", copy_us)
    return with_times([row], {row.variant: timing}, gemm)[0]


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


def test_columns_of_compute_are_those_of_ops_that_do():
    def headings(*rows):
        return [column.heading.replace("\n", " ") for column in tables.columns_for(rows)]

    moves, computes = timed(flops=900, copy_us=2.0), timed(flops=3_200_000_000, copy_us=2.0)
    assert headings(moves)[6:9] == ["GB/s", "% of copy", "time/ copy"]
    for shown in (headings(computes), headings(moves, computes)):
        assert shown[6:10] == ["GB/s", "TFLOP/s", "% of GEMM", "% of limit"]
        assert "% of copy" not in shown
    assert headings(replace(computes, target="host")) == headings(ROW)
    line = tables.text_table("gather", [computes]).splitlines()[-1]
    assert line.split()[6:10] == ["0.125", "400", "50.0", "50.0"]
    assert "| 0.125 | 400 | 50.0 | 50.0 |" in tables.markdown_table("gather", [computes])


def test_attention_and_products_compute_and_what_moves_rows_does_not():
    for op in OPS.values():
        for case in op.cases("compare"):
            cost = op.cost(case)
            row = replace(ROW, bytes=cost.bytes, flops=cost.flops)
            product = op.name == "linear" and case.workload.query_tokens > 1
            assert row.computes == (op.family == "attention" or product), (op.name, case.name)


def test_a_heading_says_which_limit_binds():
    def said(*row):
        return tables.case_parts([ROW, timed(*row)])[-1]

    assert said(0, 2.0) == said(900, 2.0) == "copy of as many bytes 2.00 us"
    assert said(3_200_000_000, 2.0) == (
        "limit 4.00 us (compute: 3.20 GFLOP at 800 TFLOP/s; copy 2.00 us)"
    )
    assert said(3_200_000_000, 5.0) == (
        "limit 5.00 us (memory: copy of as many bytes; 3.20 GFLOP at 800 TFLOP/s 4.00 us)"
    )
    assert said(320_000, 5.0).endswith("bytes; 0.320 MFLOP at 800 TFLOP/s 4.0e-04 us)")
    assert said(3_200_000_000, 2.0, None) == "copy of as many bytes 2.00 us"


def test_headings_are_cut_between_their_parts():
    row = timed(3_200_000_000, 2.0, case="a_long_name" * 8, scaled="lengths divided by 8")
    lines = tables.text_table("gather", [row]).splitlines()[3:-1]
    assert max(map(len, lines)) <= 120
    assert len(lines) == 3
    assert "".join(lines).replace(";  ", "; ") == tables.case_heading([row])
    assert f"### {tables.case_heading([row])}\n" in tables.markdown_table("gather", [row])


def test_the_report_and_its_plots_know_the_limit(tmp_path):
    rows = [timed(3_200_000_000, 2.0), timed(0, 2.0, op="another_op")]
    pictures = plots.plot(rows, tmp_path)
    found = {"gpu": {"name": "a GPU"}, "date": "today", "commit": None, "dirty": False}
    report.write(tmp_path / "report.html", rows, found, pictures)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<th class=n>% of limit</th>") == page.count("<th class=n>TFLOP/s</th>") == 1
    assert page.count("<th class=n>% of copy</th>") == 1
    assert "limit 4.00 us (compute: 3.20 GFLOP" in page
    texts = [
        [axes.get_xlabel() for axes in plots._times(row.op, [row]).axes]
        for row in (*rows, timed(3_200_000_000, 2.0, None))
    ]
    assert texts[0][1] == "% of the limit"
    assert texts[1] == texts[2]
    assert texts[1][1] == "% of the copy's speed"


def test_times_of_the_checked_build_are_marked():
    rows = [replace(ROW, target="host", checked=True), ROW]
    assert "checked build" in tables.title("gather", rows)
    assert tables.title("gather", rows[1:]) == "gather"
    assert "checked build" in tables.text_table("gather", rows)
    assert "checked build" in tables.markdown_table("gather", rows)
