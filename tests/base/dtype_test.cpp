#include "tessera/base/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace tessera {
namespace {

TEST(DTypeTest, NamesAndCodesAreUniqueAndReadBack) {
  std::set<std::string_view> names;
  for (std::uint8_t code = 0; code < kNumDTypes; ++code) {
    const auto dtype = dtype_from_code(code);
    ASSERT_TRUE(dtype);
    EXPECT_EQ(static_cast<std::uint8_t>(*dtype), code);
    EXPECT_TRUE(names.insert(dtype_name(*dtype)).second);
    EXPECT_EQ(parse_dtype(dtype_name(*dtype)), dtype);
    EXPECT_EQ(parse_dtype("torch." + std::string(dtype_name(*dtype))), dtype);
  }
  EXPECT_FALSE(dtype_from_code(kNumDTypes));
  EXPECT_FALSE(dtype_from_code(255));
}

TEST(DTypeTest, SecondNamesOfTorchAreUnderstood) {
  EXPECT_EQ(parse_dtype("torch.half"), DType::float16);
  EXPECT_EQ(parse_dtype("float"), DType::float32);
  EXPECT_EQ(parse_dtype("cdouble"), DType::complex128);
  EXPECT_FALSE(parse_dtype(""));
  EXPECT_FALSE(parse_dtype("torch."));
  EXPECT_FALSE(parse_dtype("torch.torch.float32"));
}

TEST(DTypeTest, ItemsizeCountsWholeElements) {
  EXPECT_EQ(itemsize(DType::boolean), 1U);
  EXPECT_EQ(itemsize(DType::bfloat16), 2U);
  EXPECT_EQ(itemsize(DType::complex128), 16U);
  EXPECT_EQ(itemsize(DType::float4_e2m1fn_x2), 1U);
  EXPECT_TRUE(is_floating_point(DType::float8_e8m0fnu));
  EXPECT_FALSE(is_floating_point(DType::complex64));
  EXPECT_TRUE(is_complex(DType::complex32));
  EXPECT_FALSE(is_floating_point(DType::boolean));
}

}  // namespace
}  // namespace tessera
