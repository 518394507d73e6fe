#include "tessera/base/dtype.h"

#include <array>

#include "tessera/base/error.h"

namespace tessera {
namespace {

enum class NumberClass : std::uint8_t { boolean, integer, real, complex };

struct DTypeFacts {
  DType dtype;
  std::string_view name;
  std::uint8_t itemsize;
  NumberClass number_class;
};

using enum NumberClass;
constexpr std::array<DTypeFacts, kNumDTypes> kFacts{{
    {DType::boolean, "bool", 1, boolean},
    {DType::uint8, "uint8", 1, integer},
    {DType::int8, "int8", 1, integer},
    {DType::uint16, "uint16", 2, integer},
    {DType::int16, "int16", 2, integer},
    {DType::uint32, "uint32", 4, integer},
    {DType::int32, "int32", 4, integer},
    {DType::uint64, "uint64", 8, integer},
    {DType::int64, "int64", 8, integer},
    {DType::float16, "float16", 2, real},
    {DType::bfloat16, "bfloat16", 2, real},
    {DType::float32, "float32", 4, real},
    {DType::float64, "float64", 8, real},
    {DType::complex32, "complex32", 4, complex},
    {DType::complex64, "complex64", 8, complex},
    {DType::complex128, "complex128", 16, complex},
    {DType::float8_e4m3fn, "float8_e4m3fn", 1, real},
    {DType::float8_e5m2, "float8_e5m2", 1, real},
    {DType::float8_e4m3fnuz, "float8_e4m3fnuz", 1, real},
    {DType::float8_e5m2fnuz, "float8_e5m2fnuz", 1, real},
    {DType::float8_e8m0fnu, "float8_e8m0fnu", 1, real},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2", 1, real},
}};

constexpr bool facts_are_in_order_of_codes() {
  for (std::size_t i = 0; i < kFacts.size(); ++i) {
    if (static_cast<std::size_t>(kFacts[i].dtype) != i) return false;
  }
  return true;
}
static_assert(facts_are_in_order_of_codes());

struct SecondName {
  std::string_view name;
  DType dtype;
};
constexpr SecondName kSecondNames[] = {
    {"half", DType::float16},    {"float", DType::float32},    {"double", DType::float64},
    {"short", DType::int16},     {"int", DType::int32},        {"long", DType::int64},
    {"chalf", DType::complex32}, {"cfloat", DType::complex64}, {"cdouble", DType::complex128},
};

/// Names in other libraries, for which messages suggest torch's names.
constexpr SecondName kForeignNames[] = {
    {"bf16", DType::bfloat16},
    {"fp16", DType::float16},
    {"fp32", DType::float32},
    {"fp64", DType::float64},
};

const DTypeFacts& facts_of(DType dtype) {
  const auto code = static_cast<std::size_t>(dtype);
  TESSERA_CHECK(code < kFacts.size());
  return kFacts[code];
}

}  // namespace

std::string_view dtype_name(DType dtype) {
  return facts_of(dtype).name;
}

std::optional<DType> parse_dtype(std::string_view name) {
  static constexpr std::string_view kPrefix = "torch.";
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  for (const DTypeFacts& facts : kFacts) {
    if (facts.name == name) return facts.dtype;
  }
  for (const SecondName& second : kSecondNames) {
    if (second.name == name) return second.dtype;
  }
  return std::nullopt;
}

std::string dtype_expectation(std::string_view name) {
  std::string text = "a dtype of torch";
  for (const SecondName& foreign : kForeignNames) {
    if (foreign.name == name) text += " such as " + std::string(dtype_name(foreign.dtype));
  }
  return text;
}

std::optional<DType> dtype_from_code(std::uint8_t code) {
  if (code >= kFacts.size()) return std::nullopt;
  return kFacts[code].dtype;
}

std::uint64_t itemsize(DType dtype) {
  return facts_of(dtype).itemsize;
}

bool is_floating_point(DType dtype) {
  return facts_of(dtype).number_class == NumberClass::real;
}

bool is_complex(DType dtype) {
  return facts_of(dtype).number_class == NumberClass::complex;
}

}  // namespace tessera
