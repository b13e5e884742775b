// Fibers that take turns, each with numbers that a switch must keep. Exit status 0 if it does.
#include "fiber.h"

static void* root;
static Fiber* fibers[3];
static int turn, finished;
static double totals[3];

static void count() {
    const int self = turn;
    double total = self, a = 1.5, b = 2.5, c = 3.5, d = 4.5;
    long long p = self + 1, q = self + 2, r = self + 3, s = self + 4, t = self + 5;
    for (int step = 0; step < 100; ++step) {
        turn = (self + 1) % 3;
        sandbox_switch(&fibers[self]->context, fibers[turn]->context);
        total += a + b + c + d + double(p + q + r + s + t);
        a += 1, b += 2, c += 3, d += 4, ++p, ++q, ++r, ++s, ++t;
    }
    totals[self] = total;
    turn = (self + 1) % 3;
    void* next = ++finished == 3 ? root : fibers[turn]->context;
    sandbox_switch(&fibers[self]->context, next);
}

int main() {
    for (int i = 0; i < 3; ++i) {
        fibers[i] = new Fiber(i);
        fibers[i]->reset(count);
    }
    sandbox_switch(&root, fibers[0]->context);
    for (int self = 0; self < 3; ++self) {
        // 100 steps of 12 + 5 self + 15, which grow by 10 + 5 a step.
        const double expected = self + 100 * (27 + 5 * self) + 15 * (99 * 100 / 2);
        if (totals[self] != expected) return 1;
    }
    return 0;
}
