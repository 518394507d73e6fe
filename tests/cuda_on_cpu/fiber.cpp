#include "cuda_on_cpu/fiber.h"

#include <cstdint>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

// Switches stacks. (swapcontext makes a system call each time, and with it AddressSanitizer loses
// its state of a stack.) Saves the registers that a function must preserve in the x86-64 ABI.
extern "C" void cuda_on_cpu_switch_stack(void** from, void* to);
asm(R"(
.text
.type cuda_on_cpu_switch_stack, @function
cuda_on_cpu_switch_stack:
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
.size cuda_on_cpu_switch_stack, . - cuda_on_cpu_switch_stack
)");

namespace cuda_on_cpu {
namespace {

Fiber* starting = nullptr;  // the fiber that `start_fiber` runs

}  // namespace

/// The first function on a new stack.
TESSERA_NOT_TRACED void start_fiber() {
  starting->run();
}

Fiber::Fiber(void (*body)(Fiber&)) : body_(body), stack_(new std::byte[kStackNbytes]) {
  // The first switch pops six registers and returns to start_fiber, whose return address is 0.
  const auto end = reinterpret_cast<std::uintptr_t>(stack_.get() + kStackNbytes) / 16 * 16;
  auto* const words = reinterpret_cast<std::uintptr_t*>(end) - 8;
  for (int i = 0; i < 8; ++i) words[i] = 0;
  words[6] = reinterpret_cast<std::uintptr_t>(&start_fiber);
  stack_pointer_ = words;
#ifdef __SANITIZE_THREAD__
  thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#ifdef __SANITIZE_THREAD__
  __tsan_destroy_fiber(thread_);
#endif
}

TESSERA_NOT_TRACED void Fiber::run() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &caller_stack_, &caller_stack_nbytes_);
#endif
  body_(*this);
}

TESSERA_NOT_TRACED void Fiber::enter() {
  if (!has_started_) starting = this;
  has_started_ = true;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&caller_fake_stack_, stack_.get(), kStackNbytes);
#endif
#ifdef __SANITIZE_THREAD__
  caller_thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_, __tsan_switch_to_fiber_no_sync);
#endif
  cuda_on_cpu_switch_stack(&caller_stack_pointer_, stack_pointer_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(caller_fake_stack_, nullptr, nullptr);
#endif
}

TESSERA_NOT_TRACED void Fiber::leave() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&fake_stack_, caller_stack_, caller_stack_nbytes_);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(caller_thread_, __tsan_switch_to_fiber_no_sync);
#endif
  cuda_on_cpu_switch_stack(&stack_pointer_, caller_stack_pointer_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack_, &caller_stack_, &caller_stack_nbytes_);
#endif
}

}  // namespace cuda_on_cpu
