#include "checker.h"

#include <algorithm>

namespace {

const char* name_of(Access kind) {
  return kind == Access::read ? "read" : kind == Access::write ? "write" : "atomic";
}

// "16-byte read at gather.cu:12": the caller in Python turns the mark into the place.
std::string text(size_t bytes, Access kind, uint32_t code) {
  return format("%zu-byte %s<code %x>", bytes, name_of(kind), code);
}

Range span(const Argument& argument) { return {argument.low, argument.high}; }

// Whether the view holds all these bytes. Strides descend and do not overlap.
bool holds(const Argument& argument, const char* address, size_t bytes) {
  if (!span(argument).holds(address, bytes)) return false;
  int64_t offset = address - argument.low;
  for (int i = 0; i < argument.rank; ++i)
    offset -= std::min(offset / argument.stride[i], argument.extent[i] - 1) * argument.stride[i];
  return offset + int64_t(bytes) <= argument.run;
}

// Bytes between an address and a range that does not hold it.
size_t distance(const Range& range, const char* address) {
  return address < range.low ? range.low - address : address - range.high;
}

}  // namespace

Checker::Checker(Worker& worker, char* dynamic_shared)
    : worker_(worker),
      module_(find_module(worker.launch())),
      dynamic_{dynamic_shared, dynamic_shared + worker.launch().shared_bytes} {
  shadow_.resize(module_.shared.size() + dynamic_.size());
  const auto readable = [this](auto& variable) {
    char* low = reinterpret_cast<char*>(&variable);
    module_.readable.push_back({low, low + sizeof variable});
  };
  for (uint3* index : {&threadIdx, &blockIdx, &blockDim, &gridDim}) readable(*index);
  readable(sandbox_dynamic_shared);
}

void Checker::access(const void* at, size_t bytes, Access kind, const void* return_address) {
  const char* address = static_cast<const char*>(at);
  Thread& thread = worker_.current();
  if (worker_.stack().holds(address, bytes)) return;
  const uint32_t code = code_of(return_address);
  if (shared_access(thread, address, bytes, kind, code) ||
      argument_access(address, bytes, kind, code) || constant_access(address, bytes, kind))
    return;
  out_of_bounds(thread, address, bytes, kind, code);
}

void Checker::shared_read(const Thread& thread, const void* at, size_t bytes) {
  const char* address = static_cast<const char*>(at);
  if (!shared_access(thread, address, bytes, Access::read, 0))
    worker_.fault(thread, describe(thread.site) + " of an address that is not in shared memory");
}

// Where the shadow has these bytes, or -1.
ptrdiff_t Checker::shared_offset(const char* address, size_t bytes) const {
  if (module_.shared.holds(address, bytes)) return address - module_.shared.low;
  if (dynamic_.holds(address, bytes)) return module_.shared.size() + (address - dynamic_.low);
  return -1;
}

bool Checker::shared_access(const Thread& thread, const char* address, size_t bytes, Access kind,
                            uint32_t code) {
  const ptrdiff_t first = shared_offset(address, bytes);
  if (first < 0) return false;
  explain(shadow_.access(first, bytes, thread.index, kind, code), thread, address, bytes, kind,
          code);
  return true;
}

void Checker::explain(Conflict conflict, const Thread& thread, const char* address, size_t bytes,
                      Access kind, uint32_t code) {
  if (!conflict.kind) return;
  const std::string what = text(bytes, kind, code) + " of " + shared_name(address + conflict.byte);
  if (conflict.kind == Conflict::unwritten)
    worker_.fault(thread, what + ", which no thread of the block has written");
  const std::string other = worker_.name(worker_.thread(conflict.thread));
  if (conflict.kind == Conflict::in_flight)
    worker_.fault(thread, what + ", to which a cp.async of " + other +
                              " is still under way: it has not waited");
  worker_.fault(thread, what + ", a race with the " + name_of(conflict.access) +
                            format("<code %x> by ", conflict.code) + other +
                            ": no barrier lies between them");
}

bool Checker::argument_access(const char* address, size_t bytes, Access kind, uint32_t code) {
  const Launch& launch = worker_.launch();
  for (int i = 0; i < launch.span_count; ++i) {
    const size_t index = (last_argument_ + i) % launch.span_count;
    const Argument& argument = launch.spans[index];
    if ((kind != Access::read && !argument.writable) || !holds(argument, address, bytes)) continue;
    last_argument_ = index;
    if (launch.global_races && kind == Access::write)
      mark_writer(argument, index, address, bytes, code);
    return true;
  }
  return false;
}

bool Checker::constant_access(const char* address, size_t bytes, Access kind) const {
  for (const Range& range : kind == Access::read ? module_.readable : module_.writable)
    if (range.holds(address, bytes)) return true;
  return false;
}

// One writer to a byte in all the launch, whatever barriers there are.
void Checker::mark_writer(const Argument& argument, size_t index, const char* address, size_t bytes,
                          uint32_t code) {
  std::vector<std::atomic<uint64_t>>& writers = worker_.grid().writers[index];
  const uint64_t self = worker_.global_index() + 1;
  for (size_t byte = address - argument.low; byte < address - argument.low + bytes; ++byte) {
    const uint64_t other = writers[byte].exchange(self);
    if (other && other != self)
      worker_.fault(text(bytes, Access::write, code) +
                    format(" of byte %zu of argument `%s`, which ", byte, argument.name) +
                    worker_.global_name(other - 1) + " wrote too");
  }
}

void Checker::out_of_bounds(const Thread& thread, const char* address, size_t bytes, Access kind,
                            uint32_t code) {
  const std::string what = text(bytes, kind, code);
  if (uintptr_t(address) < 4096) worker_.fault(thread, what + format(" of address %p", address));
  const Launch& launch = worker_.launch();
  struct Candidate {
    Range range;
    std::string name;
  };
  std::vector<Candidate> candidates;
  for (int i = 0; i < launch.span_count; ++i) {
    const Argument& argument = launch.spans[i];
    const std::string name = format("argument `%s`", argument.name);
    if (span(argument).holds(address, bytes)) {
      const size_t byte = address - argument.low;
      if (!holds(argument, address, bytes))
        worker_.fault(
            thread, what +
                        format(" of bytes %zu to %zu from the start of ", byte, byte + bytes - 1) +
                        name + ", which its strides leave out");
      worker_.fault(thread, what + " of " + name + ", which the kernel takes as const");
    }
    candidates.push_back({span(argument), name});
  }
  if (dynamic_.size()) candidates.push_back({dynamic_, "dynamic shared memory"});
  if (module_.shared.size()) candidates.push_back({module_.shared, "static shared memory"});
  const Candidate* nearest = nullptr;
  for (const Candidate& each : candidates) {
    if (each.range.holds(address))
      worker_.fault(thread, what +
                                format(" whose last %zu bytes lie past the end of ",
                                       size_t(address + bytes - each.range.high)) +
                                each.name);
    if (!nearest || distance(each.range, address) < distance(nearest->range, address))
      nearest = &each;
  }
  if (!nearest)
    worker_.fault(thread, what + format(" of address %p, but nothing was passed", address));
  const size_t away = distance(nearest->range, address);
  worker_.fault(thread,
                what + (away ? format(" %zu bytes ", away) : " right ") +
                    (address < nearest->range.low ? "before the start of " : "past the end of ") +
                    nearest->name + format(", which has %zu bytes", nearest->range.size()));
}

std::string Checker::shared_name(const char* address) const {
  if (dynamic_.holds(address))
    return format("dynamic shared memory, byte %zu", size_t(address - dynamic_.low));
  return format("<shared %zx>", size_t(address - module_.shared.low));
}

void Checker::async_copy(const void* shared, const void* global, size_t bytes, size_t source_bytes,
                         const void* return_address) {
  const char* address = static_cast<const char*>(shared);
  const Thread& thread = worker_.current();
  const uint32_t code = code_of(return_address);
  if (source_bytes) access(global, source_bytes, Access::read, return_address);
  const ptrdiff_t first = shared_offset(address, bytes);
  if (first < 0) out_of_bounds(thread, address, bytes, Access::write, code);
  explain(shadow_.start_copy(first, bytes, thread.index, code), thread, address, bytes,
          Access::write, code);
}

void Checker::async_done(const void* shared, size_t bytes) {
  const char* address = static_cast<const char*>(shared);
  const Thread& thread = worker_.current();
  const Conflict found = shadow_.finish_copy(shared_offset(address, bytes), bytes, thread.index);
  explain(found, thread, address, bytes, Access::write, 0);
}
