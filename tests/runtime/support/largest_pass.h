#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::test {

/// While it exists, notes how many elements the largest tensor has that an operator of this thread
/// adds, multiplies, divides or copies. One at a time in a thread.
class LargestPass {
 public:
  LargestPass() {
    largest_ = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~LargestPass() { at::removeCallback(handle_); }
  LargestPass(const LargestPass&) = delete;
  LargestPass& operator=(const LargestPass&) = delete;

  std::int64_t numel() const { return largest_; }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    for (const std::string name : {"aten::add", "aten::mul", "aten::div", "aten::copy"}) {
      const std::string_view found = function.name();
      if (found != name && found != name + "_") continue;
      for (const c10::IValue& input : function.inputs()) {
        if (input.isTensor()) largest_ = std::max(largest_, input.toTensor().numel());
      }
    }
    return nullptr;
  }

  inline static thread_local std::int64_t largest_ = 0;
  at::CallbackHandle handle_;
};

}  // namespace tessera::test
