#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#ifndef SANDBOX_UCONTEXT
#if defined(__x86_64__) || defined(__aarch64__)
#define SANDBOX_UCONTEXT 0
#else
#define SANDBOX_UCONTEXT 1
#endif
#endif

Fiber::Fiber(unsigned number) {
  const size_t guard = sysconf(_SC_PAGESIZE);
  void* memory = mmap(nullptr, guard + fiber_stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (mprotect(memory, guard, PROT_NONE) != 0) {
    munmap(memory, guard + fiber_stack_bytes);
    throw std::bad_alloc();
  }
  stack = static_cast<char*>(memory) + guard;
  top = stack + fiber_stack_bytes - number % 61 * 64;
}

#if SANDBOX_UCONTEXT

#include <ucontext.h>

void Fiber::reset(void (*entry)()) {
  ucontext_t* fresh = context ? static_cast<ucontext_t*>(context) : new ucontext_t;
  getcontext(fresh);
  fresh->uc_stack.ss_sp = stack;
  fresh->uc_stack.ss_size = top - stack;
  fresh->uc_link = nullptr;
  makecontext(fresh, entry, 0);
  context = fresh;
}

extern "C" void sandbox_switch(void** from, void* to) {
  if (!*from) *from = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}

#elif defined(__x86_64__)

// The registers that a callee must keep, then the address to return to.
void Fiber::reset(void (*entry)()) {
  void** word = reinterpret_cast<void**>(top);
  *--word = nullptr;  // where entry would return to; also aligns the stack as a call does
  *--word = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--word = nullptr;
  context = word;
}

asm(R"(
    .text
    .globl sandbox_switch
    .type sandbox_switch, @function
sandbox_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size sandbox_switch, . - sandbox_switch
)");

#else

// x19 to x30, then d8 to d15; x30 is the address to return to.
void Fiber::reset(void (*entry)()) {
  void** word = reinterpret_cast<void**>(top) - 20;
  for (int i = 0; i < 20; ++i) word[i] = nullptr;
  word[11] = reinterpret_cast<void*>(entry);
  context = word;
}

asm(R"(
    .text
    .globl sandbox_switch
    .type sandbox_switch, %function
sandbox_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size sandbox_switch, . - sandbox_switch
)");

#endif
