// An OS thread that runs blocks, one at a time.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"

struct uint3 {
  unsigned x, y, z;
};

#define SANDBOX_CONSTANT
#include "../include/sandbox/runtime.h"

class Checker;

struct Range {
  char *low = nullptr, *high = nullptr;

  size_t size() const { return size_t(high - low); }
  bool holds(const void* address) const { return low <= address && address < high; }
  bool holds(const void* address, size_t bytes) const {
    return holds(address) && bytes <= size_t(high - static_cast<const char*>(address));
  }
};

constexpr unsigned max_block_threads = 1024;
constexpr size_t dynamic_shared_capacity = 227 << 10;

// An array passed to a kernel: the bytes it may touch are those of a strided view. Mirrored in
// host_runner.py.
struct Argument {
  const char* name;
  char *low, *high;  // the bytes from the first to one past the last
  int writable;
  int rank;  // of the strides below, outermost first; bytes between them are holes
  int64_t extent[8], stride[8];
  int64_t run;  // contiguous bytes at each place
};

// Mirrored in host_runner.py.
struct Launch {
  const char* kernel;
  void (*entry)(void** arguments);
  void** arguments;
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  int shuffled;
  uint64_t seed;
  int checked;
  int global_races;
  const Argument* spans;
  int span_count;
  char* (*static_shared)();  // an address in the module's static shared memory
  char* message;             // what went wrong
  size_t message_bytes;
};

// The shared library of a kernel, as mapped for this OS thread.
struct Module {
  const char* base = nullptr;
  Range shared;  // all its static shared memory
  std::vector<Range> readable, writable;
};

Module find_module(const Launch& launch);

// One launch, shared by the workers that run its blocks.
struct Grid {
  const Launch& launch;
  uint64_t blocks;
  uint64_t step = 1, offset = 0;  // of the order of blocks in a shuffled schedule
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> faulted{UINT64_MAX};  // position of the first block that failed
  std::mutex lock;
  // For each argument and byte its writer, one more than its global index: of a launch that looks
  // for races on global memory.
  std::vector<std::vector<std::atomic<uint64_t>>> writers;

  explicit Grid(const Launch& launch);
  void report(uint64_t position, const std::string& message);
};

struct AsyncCopy {
  char* shared;
  const char* global;
  int bytes, source_bytes, group;
};

// The copies of a thread that it has not waited for, and the number of groups it has ended.
struct AsyncCopies {
  std::vector<AsyncCopy> pending;
  int groups = 0;

  void forget() {
    pending.clear();
    groups = 0;
  }
};

struct Thread;

// What a warp does once all lanes in `present` have come; `lanes` are its 32 threads, whose frames
// hold each one's operands and result.
using Collective = void (*)(Thread* lanes, unsigned present);

enum class State { running, at_barrier, at_collective };

struct Thread {
  unsigned index;
  State state;
  Fiber* fiber;
  SandboxSite site;  // where it waits
  unsigned mask;
  Collective collective;
  void* frame;
  AsyncCopies copies;

  unsigned lane() const { return index % 32; }
};

struct Warp {
  unsigned live;     // lanes that have not returned
  unsigned waiting;  // lanes at a collective
};

// The threads that could run now, first come first served, or in random order.
class ReadyQueue {
 public:
  void clear() { head = size_ = 0; }
  unsigned size() const { return size_; }
  void push(uint16_t thread) { slots[(head + size_++) % max_block_threads] = thread; }
  uint16_t pop() {
    const uint16_t thread = slots[head];
    head = (head + 1) % max_block_threads;
    --size_;
    return thread;
  }
  uint16_t take(unsigned position) {
    std::swap(slots[head], slots[(head + position) % max_block_threads]);
    return pop();
  }

 private:
  uint16_t slots[max_block_threads];
  unsigned head = 0, size_ = 0;
};

class Worker {
 public:
  Worker();
  ~Worker();

  void run(Grid& grid, const std::function<void()>& after_block);

  // For the running thread.
  Thread& current() { return *current_; }
  Range stack() const { return {running_->stack, running_->top}; }
  Warp& warp(const Thread& thread) { return warps_[thread.index / 32]; }
  Thread& thread(unsigned index) { return threads_[index]; }
  bool in_kernel() const { return current_ != nullptr; }
  void wait();  // until released
  void yield();
  AsyncCopies& copies() {
    copies_seen_ = true;
    return current_->copies;
  }
  SandboxVotes barrier(bool predicate, SandboxSite site);
  void collective(unsigned mask, void* frame, Collective operation, SandboxSite site);
  [[noreturn]] void fault(const std::string& message) { fault(*current_, message); }
  [[noreturn]] void fault(const Thread& thread, const std::string& message);
  std::string name(const Thread& thread) const;  // "thread (1,0,0)"
  unsigned thread_count() const { return thread_count_; }
  const Launch& launch() const { return grid_->launch; }
  Grid& grid() { return *grid_; }
  uint64_t global_index() const { return block_ * thread_count_ + current_->index; }
  std::string global_name(uint64_t index) const;  // "block (0,2,0), thread (1,0,0)"
  std::unique_ptr<Checker> checker;               // of a checked launch

 private:
  static void fiber_main();
  void prepare(Grid& grid);
  void run_block(uint64_t position);
  void start_next();
  void start_another(Thread& waiting);
  Thread* choose();
  void resume(void** context, Thread& next);
  bool release(Thread& any, const Thread* caller);
  Fiber* idle_fiber();
  [[noreturn]] void deadlock();
  void forget_fibers();
  unsigned random(unsigned bound);

  Grid* grid_ = nullptr;
  uint64_t position_ = 0, block_ = 0;  // of the block: in the order of running, in the grid
  pthread_t owner_{};
  void* root_ = nullptr;
  Fiber* running_ = nullptr;
  Thread* current_ = nullptr;
  unsigned thread_count_ = 0, warp_count_ = 0, started_ = 0, finished_ = 0;
  unsigned arrived_ = 0, predicates_ = 0;
  SandboxSite barrier_site_{};
  SandboxVotes votes_{};
  ReadyQueue ready_;
  bool copies_seen_ = false;
  bool shuffled_ = false;
  bool failed_ = false;
  uint64_t random_state_ = 0;
  unsigned block_shape_[3] = {0, 0, 0};
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<uint16_t> order_;  // in which threads start, in a shuffled schedule
  std::vector<uint3> coordinates_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  char* arena_ = nullptr;  // dynamic shared memory
  Range static_shared_;    // of a shuffled launch
};

// The worker of this OS thread while it runs a launch.
extern SANDBOX_THREAD_LOCAL Worker* worker;

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string describe(const SandboxSite& site);  // "__syncthreads at gather.cu:12"
