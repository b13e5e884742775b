#pragma once
#include "worker.h"
class Checker {
public:
    Checker(Worker&, char*, Range) {}
    void begin_block() {}
    void block_barrier() {}
    void warp_barrier(unsigned) {}
    void shared_read(const Thread&, const void*, size_t) {}
    void async_copy(void*, const void*, int, int) {}
    void async_done(void*, int) {}
};
