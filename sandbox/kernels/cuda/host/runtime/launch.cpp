// Spreads the blocks of a launch over OS threads.
#include <link.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "checker.h"
#include "worker.h"

Grid::Grid(const Launch& launch)
    : launch(launch), blocks(uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2]) {
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

Range find_static_shared(const Launch& launch) {
    struct Search {
        const char* inside;
        Range found;
    } search{launch.static_shared(), {}};
    dl_iterate_phdr(
        [](dl_phdr_info* module, size_t, void* data) {
            Search& search = *static_cast<Search*>(data);
            for (int i = 0; i < module->dlpi_phnum; ++i) {
                const ElfW(Phdr)& header = module->dlpi_phdr[i];
                if (header.p_type != PT_TLS || !module->dlpi_tls_data) continue;
                char* low = static_cast<char*>(module->dlpi_tls_data);
                const Range block{low, low + header.p_memsz};
                if (block.holds(search.inside)) search.found = block;
            }
            return int(search.found.low != nullptr);
        },
        &search);
    return search.found;
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

extern "C" __attribute__((visibility("default"))) int sandbox_launch(const Launch* launch) {
    using Clock = std::chrono::steady_clock;
    Grid grid(*launch);
    Worker* first = borrow();
    const unsigned most = std::min(std::thread::hardware_concurrency(), 16u);
    const Clock::time_point start = Clock::now();
    std::vector<std::thread> helpers;
    // A launch that takes no longer than starting a thread stays on one.
    first->run(grid, [&] {
        if (!helpers.empty() || Clock::now() - start < std::chrono::microseconds(200)) return;
        const uint64_t left = grid.blocks - std::min<uint64_t>(grid.next, grid.blocks);
        for (unsigned i = 1; i < std::min<uint64_t>(most, left); ++i)
            helpers.emplace_back([&grid] {
                Worker* helper = borrow();
                helper->run(grid, [] {});
                give_back(helper);
            });
    });
    for (std::thread& helper : helpers) helper.join();
    give_back(first);
    return grid.faulted != UINT64_MAX;
}
