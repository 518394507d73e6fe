#include "arithmetic/dequantized_reader.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>

#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "tessera/formats/detect.h"

namespace tessera::arithmetic {
namespace {

using test::MemoryCheckpoint;
using testing::IsEmpty;
using testing::SizeIs;

std::string folder() {
  return std::string(TESSERA_FIXTURES) + "/arithmetic/quantized/";
}

DequantizedCheckpoint dequantized(const std::string& name, DType to) {
  const FileSystem& fs = FileSystem::posix();
  return dequantize(formats::open_checkpoint(fs, folder() + name), to,
                    read_model_config(fs, folder() + name), {}, reshard::OnOverflow::refuse);
}

class DequantizedTest : public testing::TestWithParam<const char*> {};

TEST_P(DequantizedTest, EveryWindowHasTheNumbersOfTheLibraries) {
  const std::string name = GetParam();
  const auto numbers =
      formats::open_checkpoint(FileSystem::posix(), folder() + name + ".numbers.safetensors");
  for (const formats::TensorEntry& tensor : numbers->contents().tensors) {
    const auto result = dequantized(name, tensor.meta.dtype);
    ASSERT_THAT(result.problems, IsEmpty());
    const auto& tensors = result.reader->contents().tensors;
    const formats::TensorEntry* const found =
        result.reader->contents().find_tensor(tensor.meta.fqn);
    ASSERT_NE(found, nullptr);
    if (found->meta != tensor.meta) continue;  // another tensor, in another dtype
    const auto index = static_cast<std::size_t>(found - tensors.data());
    const test::Bytes expected = test::whole_tensor(
        *numbers, static_cast<std::size_t>(&tensor - numbers->contents().tensors.data()));
    const auto size = static_cast<std::int64_t>(itemsize(tensor.meta.dtype));
    const std::int64_t step = std::max<std::int64_t>(3, tensor.meta.numel() / 17);
    for (std::int64_t begin = 0; begin <= tensor.meta.numel(); begin += step) {
      for (std::int64_t end = begin; end <= tensor.meta.numel(); end += step - 1) {
        std::vector<std::byte> window(static_cast<std::size_t>((end - begin) * size));
        result.reader->read_piece(index, 0, {begin, end}, window);
        ASSERT_TRUE(std::ranges::equal(
            window,
            std::span(expected).subspan(static_cast<std::size_t>(begin * size), window.size())))
            << tensor.meta.fqn << " " << begin << " " << end;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, DequantizedTest,
                         testing::Values("awq", "fp8_blocks", "fp8_channels", "fp8_groups",
                                         "fp8_tensor", "gptq", "gptq_ordered", "int3_channels",
                                         "int4_groups", "int4_zeros", "int8_channels",
                                         "int8_packed", "mxfp4_experts", "mxfp4_groups",
                                         "mxfp8_groups", "nvfp4"),
                         [](const auto& each) { return std::string(each.param); });

TEST(DequantizeTest, WithoutQuantizedWeightsTheSourceStaysAsItIs) {
  auto source = std::make_unique<MemoryCheckpoint>();
  source->add({"w", DType::float32, {1}}, test::bytes_of<float>({1}));
  const auto* const before = source.get();
  const auto result =
      dequantize(std::move(source), DType::bfloat16, {}, {}, reshard::OnOverflow::refuse);
  EXPECT_EQ(result.reader.get(), before);
  EXPECT_EQ(result.num_weights, 0);
}

TEST(DequantizeTest, ShapesFromDiskAreChecked) {
  const auto problems_of = [](Shape codes, Shape scales) {
    auto source = std::make_unique<MemoryCheckpoint>();
    source->add({"w", DType::float8_e4m3fn, codes},
                test::Bytes(static_cast<std::size_t>(numel_of(codes))));
    source->add({"w_scale_inv", DType::float32, scales},
                test::Bytes(static_cast<std::size_t>(numel_of(scales)) * 4));
    return dequantize(std::move(source), DType::bfloat16, {}, {}, reshard::OnOverflow::refuse)
        .problems;
  };
  EXPECT_THAT(problems_of({4, 6}, {2, 3}), IsEmpty());
  EXPECT_THAT(problems_of({4, 6}, {3, 3}), SizeIs(1));
  EXPECT_THAT(problems_of({4, 6}, {0, 3}), SizeIs(1));
  EXPECT_THAT(problems_of({4, 6}, {5}), SizeIs(1));
  EXPECT_THAT(problems_of({0, 6}, {0, 3}), SizeIs(1));
  EXPECT_THAT(problems_of({}, {}), SizeIs(1));
}

}  // namespace
}  // namespace tessera::arithmetic
