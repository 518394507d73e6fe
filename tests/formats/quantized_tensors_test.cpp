#include "formats/quantized_tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "support/memory_files.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

using Tensors = std::vector<std::pair<std::string, DType>>;

CheckpointContents contents_of(const Tensors& tensors) {
  CheckpointContents contents;
  for (const auto& [fqn, dtype] : tensors) {
    contents.tensors.push_back({.meta = {fqn, dtype, {4, 4}}});
  }
  std::ranges::sort(contents.tensors, {}, [](const TensorEntry& t) { return t.meta.fqn; });
  return contents;
}

/// Returns what is said of a tensor; empty for one of numbers.
std::string said_of(const Tensors& tensors, std::string_view fqn, const std::string& method = {}) {
  const CheckpointContents contents = contents_of(tensors);
  const QuantizedTensors quantized(contents, method);
  const TensorEntry* tensor = contents.find_tensor(fqn);
  const QuantizedPart* part =
      quantized.find(static_cast<std::size_t>(tensor - contents.tensors.data()));
  return part == nullptr ? "" : quantized.in_words(*part);
}

TEST(QuantizedTensorsTest, CodesAreKnownByTheScalesBesideThem) {
  const struct {
    Tensors tensors;
    std::string codes;
    std::string said;
  } cases[] = {
      {{{"m.weight", DType::float8_e4m3fn}, {"m.weight_scale_inv", DType::float32}},
       "m.weight",
       "codes of block-scaled fp8, whose scales are m.weight_scale_inv"},
      {{{"m.weight", DType::float8_e4m3fn}, {"m.scale", DType::float8_e8m0fnu}},
       "m.weight",
       "codes of block-scaled fp8, whose scales are m.scale"},
      {{{"m.weight", DType::float8_e5m2}, {"m.weight_scale", DType::bfloat16}},
       "m.weight",
       "codes of scaled fp8, whose scales are m.weight_scale"},
      {{{"m.weight", DType::float8_e4m3fn}, {"m.weight_scale", DType::uint8}},
       "m.weight",
       "codes of mxfp8, whose scales are m.weight_scale"},
      {{{"e.up_blocks", DType::uint8}, {"e.up_scales", DType::uint8}},
       "e.up_blocks",
       "codes of mxfp4, whose scales are e.up_scales"},
      {{{"m.weight_packed", DType::uint8}, {"m.weight_scale", DType::uint8}},
       "m.weight_packed",
       "codes of mxfp4, whose scales are m.weight_scale"},
      {{{"m.weight", DType::uint8}, {"m.weight_scale", DType::float8_e4m3fn}},
       "m.weight",
       "codes of nvfp4, whose scales are m.weight_scale"},
      {{{"m.weight_packed", DType::uint8}, {"m.weight_scale", DType::float8_e4m3fn}},
       "m.weight_packed",
       "codes of nvfp4, whose scales are m.weight_scale"},
      {{{"m.weight_packed", DType::int32}, {"m.weight_scale", DType::bfloat16}},
       "m.weight_packed",
       "codes of compressed-tensors packed integers, whose scales are m.weight_scale"},
      {{{"m.weight", DType::int8}, {"m.weight_scale", DType::float32}},
       "m.weight",
       "codes of scaled int8, whose scales are m.weight_scale"},
      {{{"m.qweight", DType::int32}, {"m.scales", DType::float16}},
       "m.qweight",
       "codes of GPTQ or AWQ, whose scales are m.scales"},
      {{{"m.weight", DType::int8}, {"m.SCB", DType::float32}},
       "m.weight",
       "codes of bitsandbytes int8, whose scales are m.SCB"},
      {{{"m.weight", DType::uint8}, {"m.weight.absmax", DType::float32}},
       "m.weight",
       "codes of bitsandbytes 4-bit, whose scales are m.weight.absmax"},
  };
  for (const auto& [tensors, codes, said] : cases) {
    SCOPED_TRACE(said);
    EXPECT_EQ(said_of(tensors, codes), said);
    const std::string scales = tensors[0].first == codes ? tensors[1].first : tensors[0].first;
    std::string expected = said;
    expected.replace(0, 5, "scales");
    const auto end = expected.find(", whose");
    EXPECT_EQ(said_of(tensors, scales), expected.substr(0, end) + ", whose codes are " + codes);
  }
}

TEST(QuantizedTensorsTest, OtherCompanionsAreNamedToo) {
  const Tensors nvfp4 = {{"m.weight", DType::uint8},
                         {"m.weight_scale", DType::float8_e4m3fn},
                         {"m.weight_scale_2", DType::float32},
                         {"m.input_scale", DType::float32}};
  EXPECT_EQ(said_of(nvfp4, "m.weight_scale_2"), "second scales of nvfp4, whose codes are m.weight");
  EXPECT_EQ(said_of(nvfp4, "m.input_scale"), "scales of inputs of nvfp4, whose codes are m.weight");
  const Tensors gptq = {{"m.qweight", DType::int32},
                        {"m.scales", DType::float16},
                        {"m.qzeros", DType::int32},
                        {"m.g_idx", DType::int32}};
  EXPECT_EQ(said_of(gptq, "m.qzeros", "awq"),
            "zero points of GPTQ or AWQ (awq in config.json), whose codes are m.qweight");
  const Tensors bitsandbytes = {{"m.weight", DType::uint8},
                                {"m.weight.absmax", DType::uint8},
                                {"m.weight.quant_map", DType::float32},
                                {"m.weight.quant_state.bitsandbytes__nf4", DType::uint8}};
  EXPECT_EQ(said_of(bitsandbytes, "m.weight.quant_map"),
            "code book of bitsandbytes 4-bit, whose codes are m.weight");
}

TEST(QuantizedTensorsTest, WhatHasNoScalesOrAnotherDtypeIsNumbers) {
  EXPECT_EQ(said_of({{"m.weight", DType::float8_e4m3fn}}, "m.weight"), "");
  EXPECT_EQ(said_of({{"m.weight", DType::bfloat16}, {"m.weight_scale", DType::float32}},
                    "m.weight_scale"),
            "");
  EXPECT_EQ(
      said_of({{"m.weight", DType::bfloat16}, {"m.weight_scale_inv", DType::float32}}, "m.weight"),
      "");
  EXPECT_EQ(said_of({{"layer_scale", DType::float32}, {"layer", DType::int64}}, "layer"), "");
  EXPECT_EQ(said_of({{"_scale", DType::float32}, {"scales", DType::float16}}, "_scale"), "");
}

TEST(QuantizedTensorsTest, AliasesOfCodesAndScalesCount) {
  CheckpointContents contents = contents_of({{"a_head.weight", DType::float8_e4m3fn},
                                             {"embed.weight_scale", DType::float32},
                                             {"l0.weight", DType::float8_e4m3fn},
                                             {"l0.weight_scale", DType::float32},
                                             {"l1.weight", DType::float8_e4m3fn}});
  contents.aliases = {{"embed.weight", "a_head.weight"}, {"l1.weight_scale", "l0.weight_scale"}};
  const QuantizedTensors quantized(contents);
  EXPECT_TRUE(quantized.are_codes(0));  // a_head.weight
  EXPECT_TRUE(quantized.are_codes(2));  // l0.weight
  EXPECT_TRUE(quantized.are_codes(4));  // l1.weight
  EXPECT_FALSE(quantized.are_codes(3));
}

TEST(QuantizedTensorsTest, EightBitsOfAQuantizedModelMayBeCodes) {
  const CheckpointContents contents =
      contents_of({{"a", DType::float8_e4m3fn}, {"b", DType::bfloat16}});
  EXPECT_FALSE(QuantizedTensors(contents).doubt_in_words(0));
  EXPECT_TRUE(QuantizedTensors(contents, "fbgemm").doubt_in_words(0));
  EXPECT_FALSE(QuantizedTensors(contents, "fbgemm").doubt_in_words(1));
}

TEST(QuantizationMethodTest, IsReadFromConfigJsonInOrBesideTheCheckpoint) {
  const auto method_of = [](const std::string& config) {
    return read_quantization_method(test::MemoryFiles("dir", {{"config.json", config}}), "dir");
  };
  EXPECT_EQ(method_of(R"({"quantization_config": {"quant_method": "fp8"}})"), "fp8");
  EXPECT_EQ(method_of(R"({"text_config": {"quantization_config": {"quant_method": "awq"}}})"),
            "awq");
  EXPECT_EQ(method_of(R"({"quantization_config": {"quant_method": 8}})"), "");
  EXPECT_EQ(method_of(R"({"quantization_config": []})"), "");
  EXPECT_EQ(method_of("[]"), "");
  EXPECT_EQ(method_of("not JSON"), "");
  const test::MemoryFiles files(
      "dir", {{"config.json", R"({"quantization_config": {"quant_method": "fp8"}})"},
              {"model.safetensors", ""}});
  EXPECT_EQ(read_quantization_method(files, "dir/model.safetensors"), "fp8");
  EXPECT_EQ(read_quantization_method(test::MemoryFiles("dir", {}), "dir"), "");
}

}  // namespace
}  // namespace tessera::formats
