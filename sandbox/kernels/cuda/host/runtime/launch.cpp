// Spreads the blocks of a launch over OS threads.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <system_error>
#include <thread>

#include "checker.h"
#include "worker.h"

Grid::Grid(const Launch& launch)
    : launch(launch), blocks(uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2]) {
  if (launch.global_races)
    for (int i = 0; i < launch.span_count; ++i)
      writers.emplace_back(launch.spans[i].high - launch.spans[i].low);
  if (!launch.shuffled) return;
  step = launch.seed * 2654435761u % blocks;
  while (std::gcd(step, blocks) != 1) step = (step + 1) % blocks;
  offset = launch.seed % blocks;
}

void Grid::report(uint64_t position, const std::string& message) {
  const std::lock_guard<std::mutex> guard(lock);
  if (position > faulted) return;
  faulted = position;
  snprintf(launch.message, launch.message_bytes, "%s", message.c_str());
}

// Workers outlive launches, since their stacks are costly to make.
static std::mutex pool_lock;
static std::vector<Worker*> pool;

static Worker* borrow() {
  const std::lock_guard<std::mutex> guard(pool_lock);
  if (pool.empty()) return new Worker;
  Worker* last = pool.back();
  pool.pop_back();
  return last;
}

static void give_back(Worker* worker) {
  const std::lock_guard<std::mutex> guard(pool_lock);
  pool.push_back(worker);
}

static void run(Grid& grid) {
  using Clock = std::chrono::steady_clock;
  const unsigned most = std::min(std::thread::hardware_concurrency(), 16u);
  const Clock::time_point start = Clock::now();
  std::vector<std::thread> helpers;
  const auto help = [&grid] {
    try {
      Worker* helper = borrow();
      helper->run(grid, [] {});
      give_back(helper);
    } catch (const std::bad_alloc&) {
      // The other workers do its share.
    }
  };
  Worker* first = borrow();
  // A launch that takes no longer than starting a thread stays on one.
  first->run(grid, [&] {
    if (!helpers.empty() || Clock::now() - start < std::chrono::microseconds(200)) return;
    const uint64_t left = grid.blocks - std::min<uint64_t>(grid.next, grid.blocks);
    try {
      for (unsigned i = 1; i < std::min<uint64_t>(most, left); ++i) helpers.emplace_back(help);
    } catch (const std::system_error&) {
      // No more threads to be had: those there are do the work.
    }
  });
  for (std::thread& helper : helpers) helper.join();
  give_back(first);
}

// Whether it failed, with the reason in the launch's message.
extern "C" __attribute__((visibility("default"))) int sandbox_launch(const Launch* launch) {
  try {
    Grid grid(*launch);
    run(grid);
    return grid.faulted != UINT64_MAX;
  } catch (const std::bad_alloc&) {
    snprintf(launch->message, launch->message_bytes, "%s: no memory to run it", launch->kernel);
    return 1;
  }
}
