#include "runtime/torch_bridge.h"

#include <torch/types.h>

#include <string>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr std::pair<DType, at::ScalarType> kPairs[] = {
    {DType::boolean, at::kBool},
    {DType::uint8, at::kByte},
    {DType::int8, at::kChar},
    {DType::uint16, at::kUInt16},
    {DType::int16, at::kShort},
    {DType::uint32, at::kUInt32},
    {DType::int32, at::kInt},
    {DType::uint64, at::kUInt64},
    {DType::int64, at::kLong},
    {DType::float16, at::kHalf},
    {DType::bfloat16, at::kBFloat16},
    {DType::float32, at::kFloat},
    {DType::float64, at::kDouble},
    {DType::complex32, at::kComplexHalf},
    {DType::complex64, at::kComplexFloat},
    {DType::complex128, at::kComplexDouble},
    {DType::float8_e4m3fn, at::kFloat8_e4m3fn},
    {DType::float8_e5m2, at::kFloat8_e5m2},
    {DType::float8_e4m3fnuz, at::kFloat8_e4m3fnuz},
    {DType::float8_e5m2fnuz, at::kFloat8_e5m2fnuz},
    {DType::float8_e8m0fnu, at::kFloat8_e8m0fnu},
    {DType::float4_e2m1fn_x2, at::kFloat4_e2m1fn_x2},
};

}  // namespace

DType dtype_of(at::ScalarType type) {
  for (const auto& [dtype, scalar_type] : kPairs) {
    if (scalar_type == type) return dtype;
  }
  throw Error::expected(ErrorKind::unsupported, {}, "dtype", "a dtype that a checkpoint can hold",
                        c10::toString(type));
}

at::ScalarType scalar_type_of(DType dtype) {
  for (const auto& [known, scalar_type] : kPairs) {
    if (known == dtype) return scalar_type;
  }
  TESSERA_CHECK(false);
  return at::kFloat;
}

at::Tensor pinned(at::IntArrayRef shape, at::ScalarType dtype) {
  return torch::empty(shape, at::TensorOptions(at::kCPU).dtype(dtype).pinned_memory(true));
}

at::Tensor to_device(const at::Tensor& on_host, at::Device device) {
  if (device.is_cpu()) return on_host;
  at::Tensor source = on_host;
  if (!source.is_pinned()) {
    source = pinned(on_host.sizes(), on_host.scalar_type());
    source.copy_(on_host);
  }
  return source.to(device, /*non_blocking=*/true);
}

}  // namespace tessera
