// The exchanges between the lanes of a warp. Each lane leaves a frame with its operands; the last
// to come does the work for all.
#include <algorithm>
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace {

template <typename Function>
void each(unsigned lanes, Function function) {
  for (; lanes; lanes &= lanes - 1) function(unsigned(__builtin_ctz(lanes)));
}

template <typename Frame>
Frame& frame(Thread& thread) {
  return *static_cast<Frame*>(thread.frame);
}

struct Shuffle {
  void* value;
  int size, source;
  char sent[8];
};

void shuffle(Thread* lanes, unsigned present) {
  each(present, [&](unsigned lane) {
    Shuffle& f = frame<Shuffle>(lanes[lane]);
    memcpy(f.sent, f.value, f.size);
  });
  each(present, [&](unsigned lane) {
    Shuffle& f = frame<Shuffle>(lanes[lane]);
    if (f.source < 0 || f.source > 31 || !(present >> f.source & 1)) {
      const char* reason = f.source < 0 || f.source > 31      ? "is no lane"
                           : lanes[lane].mask >> f.source & 1 ? "has returned or never was"
                                                              : "is not in the mask";
      worker->fault(lanes[lane],
                    format("%s with mask 0x%08x reads lane %d, which %s",
                           describe(lanes[lane].site).c_str(), lanes[lane].mask, f.source, reason));
    }
    memcpy(f.value, frame<Shuffle>(lanes[f.source]).sent, f.size);
  });
}

struct Vote {
  uint64_t value;
  int64_t result;
  SandboxReduction how;
};

void ballot(Thread* lanes, unsigned present) {
  unsigned votes = 0;
  each(present,
       [&](unsigned lane) { votes |= unsigned(frame<Vote>(lanes[lane]).value != 0) << lane; });
  each(present, [&](unsigned lane) { frame<Vote>(lanes[lane]).result = votes; });
}

void match(Thread* lanes, unsigned present) {
  each(present, [&](unsigned lane) {
    Vote& f = frame<Vote>(lanes[lane]);
    f.result = 0;
    each(present, [&](unsigned other) {
      f.result |= int64_t(frame<Vote>(lanes[other]).value == f.value) << other;
    });
  });
}

int64_t combine(SandboxReduction how, int64_t a, int64_t b) {
  switch (how) {
    case sandbox_add:
      return a + b;
    case sandbox_min:
      return std::min(a, b);
    case sandbox_max:
      return std::max(a, b);
    case sandbox_and:
      return a & b;
    case sandbox_or:
      return a | b;
    default:
      return a ^ b;
  }
}

void reduce(Thread* lanes, unsigned present) {
  const unsigned first = __builtin_ctz(present);
  int64_t total = int64_t(frame<Vote>(lanes[first]).value);
  each(present & (present - 1), [&](unsigned lane) {
    const Vote& f = frame<Vote>(lanes[lane]);
    total = combine(f.how, total, int64_t(f.value));
  });
  each(present, [&](unsigned lane) { frame<Vote>(lanes[lane]).result = total; });
}

void synchronise(Thread* lanes, unsigned) {
  if (worker->checker) worker->checker->warp_barrier(lanes->index / 32);
}

int64_t vote(unsigned mask, uint64_t value, Collective how, SandboxSite site,
             SandboxReduction reduction = sandbox_add) {
  Vote f{value, 0, reduction};
  worker->collective(mask, &f, how, site);
  return f.result;
}

}  // namespace

extern "C" {

void sandbox_shuffle(unsigned mask, void* value, int size, int source, SandboxSite site) {
  Shuffle f{value, size, source, {}};
  worker->collective(mask, &f, shuffle, site);
}

void sandbox_warp_barrier(unsigned mask, SandboxSite site) {
  worker->collective(mask, nullptr, synchronise, site);
}

unsigned sandbox_ballot(unsigned mask, int predicate, SandboxSite site) {
  return unsigned(vote(mask, predicate != 0, ballot, site));
}

unsigned sandbox_match(unsigned mask, uint64_t value, SandboxSite site) {
  return unsigned(vote(mask, value, match, site));
}

int64_t sandbox_reduce(unsigned mask, int64_t value, SandboxReduction how, SandboxSite site) {
  return vote(mask, uint64_t(value), reduce, site, how);
}

unsigned sandbox_active_mask() { return worker->warp(worker->current()).live; }

unsigned sandbox_lane() { return worker->current().lane(); }
}
