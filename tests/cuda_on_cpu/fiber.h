#pragma once

#include <cstddef>
#include <memory>

/// For functions of the emulation that lanes call: ThreadSanitizer must see only the kernels' code.
#define TESSERA_NOT_TRACED __attribute__((no_sanitize("thread"), noinline))

namespace cuda_on_cpu {

/// A function with a stack of its own. It runs until it calls `leave`; the next `enter` continues
/// it there. Tells AddressSanitizer which stack is in use. For ThreadSanitizer a fiber is a thread,
/// and switches do not synchronize threads.
class Fiber {
 public:
  /// `body` starts at the first `enter`, and must not return.
  explicit Fiber(void (*body)(Fiber&));
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// Runs the fiber until it calls `leave`. Do not call it within a fiber.
  void enter();
  /// Returns to the caller of `enter`. Only the fiber itself may call it.
  void leave();

 private:
  friend void start_fiber();
  void run();

  static constexpr std::size_t kStackNbytes = 256 * 1024;

  void (*body_)(Fiber&);
  std::unique_ptr<std::byte[]> stack_;
  bool has_started_ = false;
  void* stack_pointer_ = nullptr;         // of the fiber, while it does not run
  void* caller_stack_pointer_ = nullptr;  // while the fiber runs
  // The sanitizers' handles of the two stacks.
  void* thread_ = nullptr;
  void* caller_thread_ = nullptr;
  void* fake_stack_ = nullptr;
  void* caller_fake_stack_ = nullptr;
  const void* caller_stack_ = nullptr;
  std::size_t caller_stack_nbytes_ = 0;
};

}  // namespace cuda_on_cpu
