#include "tessera/runtime/state/stateful.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <cstring>
#include <mutex>

#include "tessera/base/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& expected, const Value& value) {
  throw Error::expected(ErrorKind::mismatch, {}, "value", expected, value_to_string(value));
}

Value to_value(const at::Tensor& generator_state) {
  return Value::Bytes{std::string(static_cast<const char*>(generator_state.data_ptr()),
                                  static_cast<std::size_t>(generator_state.numel()))};
}

at::Tensor to_tensor(const Value& value) {
  const auto* const bytes = value.get_if<Value::Bytes>();
  if (bytes == nullptr) refuse("bytes, the state of a torch::Generator", value);
  at::Tensor state = torch::empty({static_cast<std::int64_t>(bytes->data.size())}, at::kByte);
  std::memcpy(state.data_ptr(), bytes->data.data(), bytes->data.size());
  return state;
}

}  // namespace

std::int64_t integer_in(const Value& value) {
  if (const auto* integer = value.get_if<std::int64_t>()) return *integer;
  refuse("an integer", value);
}

double number_in(const Value& value) {
  if (const auto* number = value.get_if<double>()) return *number;
  if (const auto* integer = value.get_if<std::int64_t>()) return static_cast<double>(*integer);
  refuse("a number", value);
}

bool flag_in(const Value& value) {
  if (const auto* flag = value.get_if<bool>()) return *flag;
  refuse("a bool", value);
}

std::string text_in(const Value& value) {
  if (const auto* text = value.get_if<std::string>()) return *text;
  refuse("a string", value);
}

void detail::refuse_number(const Value& value) {
  refuse("a number that the variable can hold", value);
}

Stateful cpu_rng() {
  Stateful rng;
  rng.state_dict = [] {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    return to_value(generator.get_state());
  };
  rng.load_state_dict = [](const Value& value) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    generator.set_state(to_tensor(value));
  };
  rng.branch = [](const Value& saved, int rank) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    generator.set_state(to_tensor(saved));
    // An odd multiplier: ranks with neighbouring numbers get very different seeds.
    constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;
    const std::uint64_t drawn = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
    generator.set_current_seed(drawn ^ (kOdd * static_cast<std::uint64_t>(rank + 1)));
    return to_value(generator.get_state());
  };
  return rng;
}

}  // namespace tessera
