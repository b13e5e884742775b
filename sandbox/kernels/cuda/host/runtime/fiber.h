// A stack and a place to continue from: what lets one OS thread interleave the threads of a block.
#pragma once

#include <cstddef>

constexpr size_t fiber_stack_bytes = 256 << 10;

struct Fiber {
  void* context = nullptr;  // where to continue; only meaningful while it does not run
  char* stack = nullptr;    // lowest usable byte
  char* top = nullptr;

  // A stack with an inaccessible page below it. `number` staggers the tops of neighbouring stacks,
  // which would otherwise all compete for the same cache sets. Throws std::bad_alloc.
  explicit Fiber(unsigned number);
  Fiber(const Fiber&) = delete;

  // Forgets what the fiber was doing: it will start with `entry`, which never returns.
  void reset(void (*entry)());
};

// Saves the running context to `from` and continues `to`.
extern "C" void sandbox_switch(void** from, void* to);
