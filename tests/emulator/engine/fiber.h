// A fiber: a stack of its own, and a way to leave it for another one and to come back.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__ELF__) && !defined(EMULATOR_UCONTEXT)

// Saves what a function must preserve on the stack that is left, and takes it from the one that is gone to.
extern "C" void emulator_switch(void** left, void* next);
asm(R"(
.text
.p2align 4
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
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
.size emulator_switch, .-emulator_switch
)");

struct Fiber {
  void* top = nullptr;

  void start(char* stack, size_t bytes, void (*entry)()) {
    auto* at = reinterpret_cast<uint64_t*>(stack + bytes / 16 * 16);
    *--at = 0;  // where the entry would return to: here a walk of the stack ends
    *--at = reinterpret_cast<uint64_t>(entry);
    for (int i = 0; i < 6; ++i) *--at = 0;
    top = at;
  }
  static void go(Fiber& from, Fiber& to) { emulator_switch(&from.top, to.top); }
};

#else
#include <ucontext.h>

struct Fiber {
  ucontext_t context;

  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void go(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
};

#endif
