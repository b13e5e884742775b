#include "worker.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>

#include "checker.h"

extern "C" {
SANDBOX_THREAD_LOCAL uint3 threadIdx;
SANDBOX_THREAD_LOCAL uint3 blockIdx;
SANDBOX_THREAD_LOCAL uint3 blockDim;
SANDBOX_THREAD_LOCAL uint3 gridDim;
SANDBOX_THREAD_LOCAL char* sandbox_dynamic_shared;
}
SANDBOX_THREAD_LOCAL Worker* worker;

std::string format(const char* pattern, ...) {
  char text[512];
  va_list values;
  va_start(values, pattern);
  vsnprintf(text, sizeof text, pattern, values);
  va_end(values);
  return text;
}

static const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

std::string describe(const SandboxSite& site) {
  return format("%s at %s:%d", site.what, base_name(site.file), site.line);
}

static bool same_text(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }

Worker::Worker()
    : threads_(max_block_threads), warps_(max_block_threads / 32), order_(max_block_threads) {
  const size_t alignment = 1024;
  void* memory = mmap(nullptr, dynamic_shared_capacity + alignment, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = reinterpret_cast<char*>((uintptr_t(memory) + alignment - 1) & ~(alignment - 1));
  for (unsigned i = 0; i < max_block_threads; ++i) threads_[i].index = i;
}

Worker::~Worker() = default;

void Worker::run(Grid& grid, const std::function<void()>& after_block) {
  prepare(grid);
  while (!failed_) {
    const uint64_t position = grid.next++;
    if (position >= grid.blocks || position > grid.faulted) break;
    run_block(position);
    after_block();
  }
  checker.reset();
  worker = nullptr;
}

void Worker::prepare(Grid& grid) {
  const Launch& launch = grid.launch;
  if (!pthread_equal(owner_, pthread_self())) forget_fibers();
  owner_ = pthread_self();
  worker = this;
  grid_ = &grid;
  failed_ = false;
  shuffled_ = launch.shuffled;
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block[0], launch.block[1], launch.block[2]};
  sandbox_dynamic_shared = arena_;
  thread_count_ = blockDim.x * blockDim.y * blockDim.z;
  warp_count_ = (thread_count_ + 31) / 32;
  for (Thread& thread : threads_) {
    thread.state = State::running;
    thread.copies.forget();
  }
  copies_seen_ = false;
  if (memcmp(block_shape_, launch.block, sizeof block_shape_) != 0) {
    memcpy(block_shape_, launch.block, sizeof block_shape_);
    coordinates_.clear();
    for (unsigned z = 0; z < blockDim.z; ++z)
      for (unsigned y = 0; y < blockDim.y; ++y)
        for (unsigned x = 0; x < blockDim.x; ++x) coordinates_.push_back({x, y, z});
  }
  if (shuffled_) static_shared_ = find_module(launch).shared;
  if (launch.checked) checker = std::make_unique<Checker>(*this, arena_);
}

static uint3 block_at(uint64_t index) {
  return {unsigned(index % gridDim.x), unsigned(index / gridDim.x % gridDim.y),
          unsigned(index / gridDim.x / gridDim.y)};
}

void Worker::run_block(uint64_t position) {
  const uint64_t index =
      uint64_t((unsigned __int128)position * grid_->step % grid_->blocks + grid_->offset) %
      grid_->blocks;
  position_ = position;
  block_ = index;
  blockIdx = block_at(index);
  started_ = finished_ = arrived_ = predicates_ = 0;
  ready_.clear();
  for (unsigned i = 0; i < warp_count_; ++i) {
    const unsigned lanes = thread_count_ - 32 * i;
    warps_[i] = {lanes >= 32 ? ~0u : (1u << lanes) - 1, 0};
  }
  if (shuffled_) {
    random_state_ = launch().seed ^ (index + 1) * 0x9e3779b97f4a7c15ull;
    std::iota(order_.begin(), order_.end(), uint16_t(0));
    for (unsigned i = thread_count_; i > 1; --i) std::swap(order_[i - 1], order_[random(i)]);
    // Uninitialised shared memory is NaN in every float format, and -1.
    memset(arena_, 0xff, launch().shared_bytes);
    if (static_shared_.low) memset(static_shared_.low, 0xff, static_shared_.size());
  }
  if (checker) checker->begin_block();
  Fiber* fiber = idle_fiber();
  running_ = fiber;
  sandbox_switch(&root_, fiber->context);
  current_ = nullptr;
  if (failed_) forget_fibers();
}

// Where a fiber lives: it runs one thread after another, each to its end.
void Worker::fiber_main() {
  Worker& self = *worker;
  Fiber* fiber = self.running_;
  for (;;) {
    do self.start_next();
    while (self.started_ < self.thread_count_ && !self.shuffled_ && !self.ready_.size());
    if (self.finished_ == self.thread_count_) {
      self.idle_.push_back(fiber);
      sandbox_switch(&fiber->context, self.root_);
    } else if (Thread* next = self.choose()) {
      self.idle_.push_back(fiber);
      self.resume(&fiber->context, *next);
    }
  }
}

void Worker::start_next() {
  const unsigned index = shuffled_ ? order_[started_] : started_;
  ++started_;
  // Nothing is written to the thread's own record: most threads never wait and need none.
  current_ = &threads_[index];
  if (copies_seen_) current_->copies.forget();
  threadIdx = coordinates_[index];
  const Launch& launch = grid_->launch;
  launch.entry(launch.arguments);
  ++finished_;
  Warp& warp = warps_[index / 32];
  warp.live &= ~(1u << index % 32);
  // Whoever waits for this lane need not any more.
  for (unsigned left = warp.waiting; left; left &= (left - 1) & warp.waiting)
    release(threads_[(index & ~31u) + __builtin_ctz(left)], nullptr);
}

// The thread to resume, or null to start another.
Thread* Worker::choose() {
  const unsigned ready = ready_.size(), fresh = thread_count_ - started_;
  if (!ready) {
    if (!fresh) deadlock();
    return nullptr;
  }
  if (!shuffled_) return &threads_[ready_.pop()];
  const unsigned choice = random(ready + (fresh != 0));
  return choice == ready ? nullptr : &threads_[ready_.take(choice)];
}

void Worker::resume(void** context, Thread& next) {
  current_ = &next;
  running_ = next.fiber;
  threadIdx = coordinates_[next.index];
  sandbox_switch(context, next.fiber->context);
}

void Worker::wait() {
  Thread& self = *current_;
  self.fiber = running_;
  if (Thread* next = choose()) {
    if (next != &self) resume(&self.fiber->context, *next);
  } else {
    start_another(self);
  }
}

void Worker::yield() {
  Thread& self = *current_;
  self.fiber = running_;
  ready_.push(uint16_t(self.index));
  if (started_ < thread_count_) {
    start_another(self);
  } else {
    wait();
  }
}

// Leaves a thread that waits, for a fiber that starts the next.
void Worker::start_another(Thread& waiting) {
  running_ = idle_fiber();
  sandbox_switch(&waiting.fiber->context, running_->context);
}

Fiber* Worker::idle_fiber() {
  if (idle_.empty()) {
    try {
      fibers_.push_back(std::make_unique<Fiber>(unsigned(fibers_.size())));
    } catch (const std::bad_alloc&) {
      if (!current_) throw;
      fault("no memory for the stack of another thread");
    }
    fibers_.back()->reset(fiber_main);
    return fibers_.back().get();
  }
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

// Starts all fibers over: after a fault, or because they remember another OS thread.
void Worker::forget_fibers() {
  idle_.clear();
  for (auto fiber = fibers_.rbegin(); fiber != fibers_.rend(); ++fiber) {
    (*fiber)->reset(fiber_main);
    idle_.push_back(fiber->get());
  }
}

SandboxVotes Worker::barrier(bool predicate, SandboxSite site) {
  Thread& self = *current_;
  if (arrived_ == 0) {
    barrier_site_ = site;
  } else if (site.line != barrier_site_.line || !same_text(site.file, barrier_site_.file)) {
    for (unsigned i = 0; i < thread_count_; ++i)
      if (threads_[i].state == State::at_barrier)
        fault("comes to " + describe(site) + ", but " + name(threads_[i]) + " waits in " +
              describe(barrier_site_) + ": all threads of a block must come to the same barrier");
  }
  predicates_ += predicate;
  if (++arrived_ < thread_count_) {
    self.state = State::at_barrier;
    self.site = site;
    wait();
  } else {
    votes_ = {predicates_, predicates_ == thread_count_, predicates_ != 0};
    arrived_ = predicates_ = 0;
    if (checker) checker->block_barrier();
    for (unsigned i = 0; i < thread_count_; ++i)
      if (i != self.index) {
        threads_[i].state = State::running;
        ready_.push(uint16_t(i));
      }
  }
  return votes_;
}

void Worker::collective(unsigned mask, void* frame, Collective operation, SandboxSite site) {
  Thread& self = *current_;
  if (!(mask >> self.lane() & 1))
    fault(format("%s with mask 0x%08x, in which its own lane %u is not", describe(site).c_str(),
                 mask, self.lane()));
  self.state = State::at_collective;
  self.site = site;
  self.mask = mask;
  self.collective = operation;
  self.frame = frame;
  warp(self).waiting |= 1u << self.lane();
  if (!release(self, &self)) wait();
}

// Runs the collective that `any` waits for if all lanes it needs have come, and lets all but the
// caller go on.
bool Worker::release(Thread& any, const Thread* caller) {
  Warp& warp = this->warp(any);
  const unsigned needed = any.mask & warp.live;
  if ((warp.waiting & needed) != needed) return false;
  Thread* lanes = &threads_[any.index & ~31u];
  for (unsigned left = needed; left; left &= left - 1) {
    const Thread& lane = lanes[__builtin_ctz(left)];
    if (lane.mask != any.mask || lane.collective != any.collective ||
        !same_text(lane.site.what, any.site.what))
      return false;
  }
  any.collective(lanes, needed);
  warp.waiting &= ~needed;
  for (unsigned left = needed; left; left &= left - 1) {
    Thread& lane = lanes[__builtin_ctz(left)];
    lane.state = State::running;
    if (&lane != caller) ready_.push(uint16_t(lane.index));
  }
  return true;
}

// All threads that have not returned wait: says for what.
void Worker::deadlock() {
  for (unsigned i = 0; i < thread_count_; ++i) {
    const Thread& thread = threads_[i];
    const Warp& warp = warps_[i / 32];
    if (!(warp.waiting >> thread.lane() & 1)) continue;
    for (unsigned left = thread.mask & warp.live; left; left &= left - 1) {
      const unsigned number = __builtin_ctz(left);
      const Thread& lane = threads_[(i & ~31u) + number];
      if (lane.state == State::at_collective && lane.mask == thread.mask &&
          same_text(lane.site.what, thread.site.what))
        continue;
      std::string where = describe(lane.site);
      if (lane.state == State::at_collective) where += format(" with mask 0x%08x", lane.mask);
      fault(thread, format("waits in %s with mask 0x%08x for lane %u, but that lane waits in ",
                           describe(thread.site).c_str(), thread.mask, number) +
                        where);
    }
  }
  unsigned waiting = 0, returned = 0;
  while (!(warps_[waiting / 32].live >> waiting % 32 & 1)) ++waiting;
  while (warps_[returned / 32].live >> returned % 32 & 1) ++returned;
  fault(threads_[waiting], "waits in " + describe(barrier_site_) + " for " +
                               name(threads_[returned]) +
                               format(", which has returned (as have %u of the block's %u threads)",
                                      finished_, thread_count_));
}

static std::string triple(const char* what, uint3 at) {
  return format("%s (%u,%u,%u)", what, at.x, at.y, at.z);
}

std::string Worker::name(const Thread& thread) const {
  return triple("thread", coordinates_[thread.index]);
}

std::string Worker::global_name(uint64_t index) const {
  return triple("block", block_at(index / thread_count_)) + ", " +
         name(threads_[index % thread_count_]);
}

void Worker::fault(const Thread& thread, const std::string& message) {
  failed_ = true;
  const std::string who = global_name(block_ * thread_count_ + thread.index);
  grid_->report(position_, std::string(launch().kernel) + ", " + who + ": " + message);
  void* abandoned = nullptr;
  sandbox_switch(&abandoned, root_);
  __builtin_unreachable();
}

unsigned Worker::random(unsigned bound) {
  uint64_t bits = random_state_ += 0x9e3779b97f4a7c15ull;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
  return unsigned((bits >> 32) * bound >> 32);
}

extern "C" {

SandboxVotes sandbox_barrier(int predicate, SandboxSite site) {
  return worker->barrier(predicate != 0, site);
}

void sandbox_yield() { worker->yield(); }

void sandbox_trap(const char* what, const char* file, int line) {
  worker->fault(format("%s at %s:%d", what, base_name(file), line));
}

// In place of the C library's, which would end the process.
__attribute__((visibility("default"))) void __wrap___assert_fail(const char* condition,
                                                                 const char* file, unsigned line,
                                                                 const char*) {
  sandbox_trap(format("assertion `%s` failed", condition).c_str(), file, int(line));
}
}
