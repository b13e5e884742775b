// The C interface between a compiled kernel and the runtime that runs it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SANDBOX_THREAD_LOCAL __thread __attribute__((tls_model("initial-exec")))

#pragma GCC visibility push(default)
extern "C" {

// Constant to a kernel, which lets the compiler keep them in registers across calls: they never
// change within one thread's run of a kernel. Not of type dim3, since with constructors a type is
// not constant to the compiler.
#ifndef SANDBOX_CONSTANT
#define SANDBOX_CONSTANT const
#endif
extern SANDBOX_THREAD_LOCAL SANDBOX_CONSTANT uint3 threadIdx;
extern SANDBOX_THREAD_LOCAL SANDBOX_CONSTANT uint3 blockIdx;
extern SANDBOX_THREAD_LOCAL SANDBOX_CONSTANT uint3 blockDim;
extern SANDBOX_THREAD_LOCAL SANDBOX_CONSTANT uint3 gridDim;
extern SANDBOX_THREAD_LOCAL char* SANDBOX_CONSTANT sandbox_dynamic_shared;

// Where in the source a thread waits: `what` is the name of the call.
struct SandboxSite {
  const char* what;
  const char* file;
  int line;
};

enum SandboxReduction {
  sandbox_add,
  sandbox_min,
  sandbox_max,
  sandbox_and,
  sandbox_or,
  sandbox_xor
};

struct SandboxVotes {
  unsigned count, all, any;
};

SandboxVotes sandbox_barrier(int predicate, SandboxSite site);
void sandbox_warp_barrier(unsigned mask, SandboxSite site);
// Sets `value` to that of `source`, a lane number.
void sandbox_shuffle(unsigned mask, void* value, int size, int source, SandboxSite site);
unsigned sandbox_ballot(unsigned mask, int predicate, SandboxSite site);
// The lanes whose value has the same bits.
unsigned sandbox_match(unsigned mask, uint64_t value, SandboxSite site);
int64_t sandbox_reduce(unsigned mask, int64_t value, SandboxReduction how, SandboxSite site);
unsigned sandbox_active_mask();
unsigned sandbox_lane();
void sandbox_yield();
[[noreturn]] void sandbox_trap(const char* what, const char* file, int line);

// Operands are registers in the lane layout of the PTX instruction of the same shape.
enum SandboxOperand { sandbox_bf16, sandbox_f16, sandbox_tf32 };
void sandbox_mma(SandboxOperand type, int k, float* d, const unsigned* a, const unsigned* b,
                 const float* c, SandboxSite site);
void sandbox_ldmatrix(unsigned* registers, int matrices, int transposed, const void* row,
                      SandboxSite site);
void sandbox_async_copy(void* shared, const void* global, int bytes, int source_bytes,
                        SandboxSite site);
void sandbox_async_commit();
void sandbox_async_wait(int groups_left);

// For the checked build, whose atomics must not be mistaken for plain accesses.
uint64_t sandbox_atomic_load(void* address, int size);
int sandbox_atomic_swap_if(void* address, int size, uint64_t* expected, uint64_t desired);
}
#pragma GCC visibility pop
