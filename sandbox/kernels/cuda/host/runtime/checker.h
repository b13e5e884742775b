// What the checked build verifies at every access to memory.
#pragma once

#include "shadow.h"
#include "worker.h"

class Checker {
 public:
  explicit Checker(Worker& worker, char* dynamic_shared);

  void begin_block() { shadow_.begin_block(); }
  void block_barrier() { shadow_.block_barrier(); }
  void warp_barrier(unsigned warp) { shadow_.warp_barrier(warp); }

  // Faults unless the running thread may do this. `code` is where in the kernel's code.
  void access(const void* address, size_t bytes, Access kind, const void* code);
  // The same for a thread that waits, and for shared memory only.
  void shared_read(const Thread& thread, const void* address, size_t bytes);

  void async_copy(const void* shared, const void* global, size_t bytes, size_t source_bytes,
                  const void* code);
  void async_done(const void* shared, size_t bytes);

 private:
  ptrdiff_t shared_offset(const char* address, size_t bytes) const;
  bool shared_access(const Thread& thread, const char* address, size_t bytes, Access kind,
                     uint32_t code);
  bool argument_access(const char* address, size_t bytes, Access kind, uint32_t code);
  bool constant_access(const char* address, size_t bytes, Access kind) const;
  void mark_writer(const Argument& argument, size_t index, const char* address, size_t bytes,
                   uint32_t code);
  void explain(Conflict conflict, const Thread& thread, const char* address, size_t bytes,
               Access kind, uint32_t code);
  [[noreturn]] void out_of_bounds(const Thread& thread, const char* address, size_t bytes,
                                  Access kind, uint32_t code);
  std::string shared_name(const char* address) const;
  uint32_t code_of(const void* return_address) const {
    return uint32_t(static_cast<const char*>(return_address) - 1 - module_.base);
  }

  Worker& worker_;
  Module module_;
  Range dynamic_;
  SharedShadow shadow_;
  size_t last_argument_ = 0;
};
