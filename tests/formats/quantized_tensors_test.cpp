#include "formats/quantized_tensors.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/forwarding_file_system.h"
#include "support/error_matchers.h"
#include "support/files.h"
#include "support/memory_files.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
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

/// Returns the text about a tensor that is a part of a quantized weight; else an empty text.
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
       "codes of block-scaled fp8; the scales are m.weight_scale_inv"},
      {{{"m.weight", DType::float8_e4m3fn}, {"m.scale", DType::float8_e8m0fnu}},
       "m.weight",
       "codes of block-scaled fp8; the scales are m.scale"},
      {{{"m.weight", DType::float8_e5m2}, {"m.weight_scale", DType::bfloat16}},
       "m.weight",
       "codes of scaled fp8; the scales are m.weight_scale"},
      {{{"m.weight", DType::float8_e4m3fn}, {"m.weight_scale", DType::uint8}},
       "m.weight",
       "codes of mxfp8; the scales are m.weight_scale"},
      {{{"e.up_blocks", DType::uint8}, {"e.up_scales", DType::uint8}},
       "e.up_blocks",
       "codes of mxfp4; the scales are e.up_scales"},
      {{{"m.weight_packed", DType::uint8}, {"m.weight_scale", DType::uint8}},
       "m.weight_packed",
       "codes of mxfp4; the scales are m.weight_scale"},
      {{{"m.weight", DType::uint8}, {"m.weight_scale", DType::float8_e4m3fn}},
       "m.weight",
       "codes of nvfp4; the scales are m.weight_scale"},
      {{{"m.weight_packed", DType::uint8}, {"m.weight_scale", DType::float8_e4m3fn}},
       "m.weight_packed",
       "codes of nvfp4; the scales are m.weight_scale"},
      {{{"m.weight_packed", DType::int32}, {"m.weight_scale", DType::bfloat16}},
       "m.weight_packed",
       "codes of compressed-tensors packed integers; the scales are m.weight_scale"},
      {{{"m.weight", DType::int8}, {"m.weight_scale", DType::float32}},
       "m.weight",
       "codes of scaled int8; the scales are m.weight_scale"},
      {{{"m.qweight", DType::int32}, {"m.scales", DType::float16}},
       "m.qweight",
       "codes of GPTQ or AWQ; the scales are m.scales"},
      {{{"m.weight", DType::int8}, {"m.SCB", DType::float32}},
       "m.weight",
       "codes of bitsandbytes int8; the scales are m.SCB"},
      {{{"m.weight", DType::uint8}, {"m.weight.absmax", DType::float32}},
       "m.weight",
       "codes of bitsandbytes 4-bit; the scales are m.weight.absmax"},
      {{{"m.weight", DType::int8}, {"m.weight_scales", DType::float16}},
       "m.weight",
       "codes of EETQ int8; the scales are m.weight_scales"},
      {{{"m.qweight", DType::int8}, {"m.weight_scales", DType::float16}},
       "m.qweight",
       "codes of EETQ int8; the scales are m.weight_scales"},
      {{{"m.weight", DType::uint8}, {"m.weight_scale", DType::bfloat16}},
       "m.weight",
       "codes of BitNet or packed int4; the scales are m.weight_scale"},
      {{{"m.weight", DType::uint32}, {"m.scales", DType::bfloat16}},
       "m.weight",
       "codes of MLX integers; the scales are m.scales"},
      {{{"m.weight", DType::uint32}, {"m.scales", DType::uint8}},
       "m.weight",
       "codes of MLX integers; the scales are m.scales"},
      {{{"m.codes", DType::int16}, {"m.scales", DType::float16}, {"m.codebooks", DType::float16}},
       "m.codes",
       "codes of AQLM; the scales are m.scales"},
      {{{"m.W_q", DType::uint8}, {"m.scale", DType::float16}},
       "m.W_q",
       "codes of HQQ; the scales are m.scale"},
      {{{"m.W_q", DType::int32}, {"m.meta.scale", DType::float16}},
       "m.W_q",
       "codes of HQQ; the scales are m.meta.scale"},
      {{{"m.W_q", DType::bfloat16},
        {"m.scale", DType::bfloat16},
        {"m.view_as_float", DType::uint8}},
       "m.W_q",
       "codes of HQQ; the scales are m.scale"},
      {{{"m.weight", DType::float8_e4m3fn}, {"m.scale_weight", DType::float32}},
       "m.weight",
       "codes of scaled fp8 of ComfyUI; the scales are m.scale_weight"},
      {{{"m.weight._data", DType::int8}, {"m.weight._scale", DType::float16}},
       "m.weight._data",
       "codes of quanto; the scales are m.weight._scale"},
      {{{"m.weight._data", DType::float8_e4m3fn}, {"m.weight._scale", DType::bfloat16}},
       "m.weight._data",
       "codes of quanto; the scales are m.weight._scale"},
      {{{"m.weight._data._data", DType::uint8}, {"m.weight._scale", DType::bfloat16}},
       "m.weight._data._data",
       "codes of quanto; the scales are m.weight._scale"},
      {{{"m._weight_qdata", DType::float8_e4m3fn}, {"m._weight_scale", DType::float32}},
       "m._weight_qdata",
       "codes of torchao; the scales are m._weight_scale"},
      {{{"m._weight_qdata", DType::int32}, {"m._weight_scale_and_zero", DType::bfloat16}},
       "m._weight_qdata",
       "codes of torchao; the scales are m._weight_scale_and_zero"},
  };
  for (const auto& [tensors, codes, said] : cases) {
    SCOPED_TRACE(said);
    EXPECT_EQ(said_of(tensors, codes), said);
    const std::string scales = tensors[0].first == codes ? tensors[1].first : tensors[0].first;
    std::string expected = said;
    expected.replace(0, 5, "scales");
    const auto end = expected.find("; the ");
    EXPECT_EQ(said_of(tensors, scales), expected.substr(0, end) + "; the codes are " + codes);
  }
}

TEST(QuantizedTensorsTest, OtherCompanionsAreNamedToo) {
  const Tensors nvfp4 = {{"m.weight", DType::uint8},
                         {"m.weight_scale", DType::float8_e4m3fn},
                         {"m.weight_scale_2", DType::float32},
                         {"m.input_scale", DType::float32}};
  EXPECT_EQ(said_of(nvfp4, "m.weight_scale_2"), "second scales of nvfp4; the codes are m.weight");
  EXPECT_EQ(said_of(nvfp4, "m.input_scale"), "scales of inputs of nvfp4; the codes are m.weight");
  const Tensors fp8 = {{"m.weight", DType::float8_e4m3fn},
                       {"m.weight_scale_inv", DType::float32},
                       {"m.activation_scale", DType::float32},
                       {"m.pre_quant_scale", DType::bfloat16}};
  EXPECT_EQ(said_of(fp8, "m.activation_scale"),
            "scales of inputs of block-scaled fp8; the codes are m.weight");
  EXPECT_EQ(said_of(fp8, "m.pre_quant_scale"),
            "factors of inputs of block-scaled fp8; the codes are m.weight");
  const Tensors gptq = {{"m.qweight", DType::int32},
                        {"m.scales", DType::float16},
                        {"m.qzeros", DType::int32},
                        {"m.g_idx", DType::int32}};
  EXPECT_EQ(said_of(gptq, "m.qzeros", "awq"),
            "zero points of GPTQ or AWQ (awq in config.json); the codes are m.qweight");
  const Tensors bitsandbytes = {{"m.weight", DType::uint8},
                                {"m.weight.absmax", DType::uint8},
                                {"m.weight.quant_map", DType::float32},
                                {"m.weight.quant_state.bitsandbytes__nf4", DType::uint8}};
  EXPECT_EQ(said_of(bitsandbytes, "m.weight.quant_map"),
            "code book of bitsandbytes 4-bit; the codes are m.weight");
}

TEST(QuantizedTensorsTest, FloatsBesideTheCodesOfOtherFrameworksAreParts) {
  const struct {
    Tensors tensors;  // codes, scales, then the float tensor that is tested
    std::string said;
  } cases[] = {
      {{{"m.weight", DType::uint32}, {"m.scales", DType::float16}, {"m.biases", DType::float16}},
       "offsets of MLX integers; the codes are m.weight"},
      {{{"m.codes", DType::int16}, {"m.scales", DType::float16}, {"m.codebooks", DType::float16}},
       "code book of AQLM; the codes are m.codes"},
      {{{"m.W_q", DType::uint8}, {"m.scale", DType::float16}, {"m.zero", DType::float16}},
       "zero points of HQQ; the codes are m.W_q"},
      {{{"m.W_q", DType::uint8},
        {"m.scale", DType::float16},
        {"m.meta_zero.scale", DType::float16}},
       "scales of zero points of HQQ; the codes are m.W_q"},
      {{{"m.W_q", DType::uint8},
        {"m.scale_q", DType::uint8},
        {"m.meta_scale.scale", DType::float16}},
       "second scales of HQQ; the codes are m.W_q"},
      {{{"m.weight", DType::float8_e4m3fn},
        {"m.scale_weight", DType::float32},
        {"m.scale_input", DType::float32}},
       "scales of inputs of scaled fp8 of ComfyUI; the codes are m.weight"},
      {{{"d.m.weight", DType::float8_e4m3fn},
        {"d.m.scale_weight", DType::float32},
        {"d.scaled_fp8", DType::float8_e4m3fn}},
       "marker of scaled fp8 of ComfyUI; the codes are d.m.weight"},
      {{{"m.weight._data._data", DType::uint8},
        {"m.weight._scale", DType::bfloat16},
        {"m.weight._shift", DType::bfloat16}},
       "zero points of quanto; the codes are m.weight._data._data"},
      {{{"m.weight._data", DType::int8},
        {"m.weight._scale", DType::bfloat16},
        {"m.output_scale", DType::float32}},
       "scales of outputs of quanto; the codes are m.weight._data"},
      {{{"m._weight_qdata", DType::float4_e2m1fn_x2},
        {"m._weight_scale", DType::float8_e4m3fn},
        {"m._weight_per_tensor_scale", DType::float32}},
       "second scales of torchao; the codes are m._weight_qdata"},
  };
  for (const auto& [tensors, said] : cases) {
    EXPECT_EQ(said_of(tensors, tensors[2].first), said);
  }
}

TEST(QuantizedTensorsTest, AMarkerMayBeAValue) {
  CheckpointContents contents =
      contents_of({{"m.W_q", DType::float16}, {"m.scale", DType::float16}});
  EXPECT_TRUE(QuantizedTensors(contents).empty());
  contents.values = {{"m.view_as_float", {}}};
  EXPECT_TRUE(QuantizedTensors(contents).are_codes(0));
}

TEST(QuantizedTensorsTest, ModelsThatUseTheWordsOtherwiseAreNumbers) {
  const Tensors models[] = {
      {{"attention.W_q", DType::float32}, {"attention.scale", DType::float32}},
      {{"vq.codes", DType::int64}, {"vq.scales", DType::float32}},
      {{"vq.codes", DType::float32},
       {"vq.codebooks", DType::float32},
       {"vq.scales", DType::float32}},
      {{"norm.weight", DType::float32}, {"norm.scale_weight", DType::float32}},
      {{"norm.weight", DType::float32},
       {"norm.scales", DType::float32},
       {"norm.biases", DType::float32}},
      {{"m.weight", DType::bfloat16},
       {"m.input_scale", DType::float32},
       {"m.output_scale", DType::float32}},
      {{"mask.weight", DType::uint8}, {"mask.scales", DType::float32}},
      {{"weight._data", DType::float32}, {"weight._scale", DType::float32}},
      {{"m.weight", DType::bfloat16}, {"m.weight_scale", DType::bfloat16}},
      {{"m.weight", DType::float8_e4m3fn}, {"scaled_fp8", DType::float8_e4m3fn}},
  };
  for (const Tensors& model : models) {
    EXPECT_TRUE(QuantizedTensors(contents_of(model)).empty()) << model[0].first;
  }
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

TEST(QuantizedTensorsTest, FloatsNamedAsScalesBesideIntegersMayBeScales) {
  struct Case {
    Tensors tensors;
    std::string scales;
  };
  for (const Case& c :
       {Case{{{"l.qweight", DType::int8}, {"l.wscales", DType::bfloat16}}, "l.wscales"},
        Case{{{"l.suh", DType::float16}, {"l.trellis", DType::int16}}, "l.suh"},
        Case{{{"l.q_scale_max", DType::float16}, {"l.q_weight", DType::int32}}, "l.q_scale_max"},
        Case{{{"l.centroids.weight", DType::float16}, {"l.indices", DType::uint16}},
             "l.centroids.weight"},
        Case{{{"l.col_vals", DType::float16}, {"l.dense_weights", DType::int64}}, "l.col_vals"}}) {
    SCOPED_TRACE(c.scales);
    CheckpointContents contents = contents_of(c.tensors);
    const auto doubt = [&](const std::string& fqn) {
      const auto* const tensor = contents.find_tensor(fqn);
      return QuantizedTensors(contents).doubt_in_words(
          static_cast<std::size_t>(tensor - contents.tensors.data()));
    };
    EXPECT_TRUE(doubt(c.scales));
    for (TensorEntry& each : contents.tensors) each.meta.shape = {4};
    EXPECT_FALSE(doubt(c.scales)) << "integers with one dimension";
  }
  for (const Tensors& model :
       {Tensors{{"a.index", DType::int64}, {"a.logit_scale", DType::float32}},
        Tensors{{"a.index", DType::int32}, {"b.logit_scale", DType::float32}},
        Tensors{{"ids", DType::int32}, {"scale", DType::float32}}}) {
    EXPECT_FALSE(QuantizedTensors(contents_of(model)).doubt_in_words(1)) << model[1].first;
  }
}

struct ShapedTensor {
  std::string fqn;
  DType dtype;
  Shape shape;
};

/// Returns the names of the tensors of a model, of which nothing names a quantization method, that
/// may be scales.
std::vector<std::string> possible_scales(const std::vector<ShapedTensor>& tensors) {
  CheckpointContents contents;
  for (const auto& [fqn, dtype, shape] : tensors) {
    contents.tensors.push_back({.meta = {fqn, dtype, shape}});
  }
  std::ranges::sort(contents.tensors, {}, [](const TensorEntry& t) { return t.meta.fqn; });
  const QuantizedTensors quantized(contents);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    if (quantized.find(i) != nullptr || !quantized.doubt_in_words(i)) continue;
    names.push_back(contents.tensors[i].meta.fqn);
  }
  return names;
}

TEST(QuantizedTensorsTest, FloatsInALayerWithCodesInsteadOfAWeightMayBeScales) {
  const struct {
    std::vector<ShapedTensor> tensors;
    std::vector<std::string> scales;
  } cases[] = {
      {{{"l.trellis", DType::int16, {32, 64}},  // QTIP
        {"l.SU", DType::float16, {64}},
        {"l.SV", DType::float32, {32}},
        {"l.tlut", DType::float16, {512, 2}},
        {"l.rcp", DType::int64, {}}},
       {"l.SU", "l.SV", "l.tlut"}},
      {{{"l.Qidxs", DType::int64, {32, 8}},  // QuIP#
        {"l.SU", DType::float16, {64}},
        {"l.SV", DType::float16, {32}},
        {"l.Wscale", DType::float32, {}},
        {"l.A", DType::float16, {32, 4}},
        {"l.codebook_id", DType::int64, {}},
        {"norm.weight", DType::float16, {32}}},
       {"l.A", "l.SU", "l.SV", "l.Wscale"}},
      {{{"l.qweight", DType::int32, {32, 32}},  // SqueezeLLM
        {"l.lookup_table", DType::float32, {32, 16}},
        {"l.vals", DType::float32, {20}},
        {"l.rows", DType::int32, {33}},
        {"l.bias", DType::float16, {32}}},
       {"l.lookup_table", "l.vals"}},
      {{{"l.qweight", DType::int32, {4, 32, 8}},  // Any-Precision
        {"l.lut3", DType::float16, {32, 8}},
        {"l.lut4", DType::float16, {32, 16}}},
       {"l.lut3", "l.lut4"}},
      {{{"l.packed", DType::uint8, {1 << 17}}, {"l.mine", DType::bfloat16, {4096}}}, {"l.mine"}},
      {{{"l.weight", DType::int8, {32, 32}}, {"l.mine", DType::float8_e4m3fn, {32}}}, {"l.mine"}},
      {{{"l.weight", DType::bfloat16, {32, 32}},  // the names of scales count beside a weight too
        {"l.q", DType::int8, {32, 32}},
        {"l.mine", DType::bfloat16, {32}},
        {"l.wscales", DType::bfloat16, {32}}},
       {"l.wscales"}},
      {{{"l.a_weight", DType::int8, {32, 32}},  // a known scheme beside an unknown one
        {"l.a_weight_scale", DType::float32, {32}},
        {"l.b", DType::int8, {32, 32}},
        {"l.mine", DType::bfloat16, {32}}},
       {"l.mine"}},
  };
  for (const auto& [tensors, scales] : cases) {
    EXPECT_EQ(possible_scales(tensors), scales) << tensors.front().fqn;
  }
}

TEST(QuantizedTensorsTest, IntegersThatUsualModelsHaveAreNoCodes) {
  const std::vector<ShapedTensor> models[] = {
      {{"v.embeddings.position_ids", DType::int64, {1, 257}},  // CLIP
       {"v.embeddings.class_embedding", DType::float32, {768}}},
      {{"t.position_ids", DType::int32, {1, 512}}, {"t.inv_freq", DType::float32, {32}}},
      {{"attn.relative_position_index", DType::int64, {49, 49}},  // Swin v2
       {"attn.relative_coords_table", DType::float32, {1, 13, 13, 2}},
       {"attn.logit_scale", DType::float32, {3, 1, 1}},
       {"attn.q_bias", DType::float32, {96}}},
      {{"attn.relative_position_index", DType::int32, {49, 49}},
       {"attn.relative_position_bias_table", DType::float32, {169, 3}},
       {"attn.logit_scale", DType::float32, {3, 1, 1}}},
      {{"attn.attention_bias_idxs", DType::int64, {196, 196}},  // LeViT
       {"attn.attention_biases", DType::float32, {4, 196}}},
      {{"h.0.attn.bias", DType::uint8, {1, 1, 1024, 1024}},  // GPT-2
       {"h.0.attn.masked_bias", DType::float32, {1}}},
      {{"l.weight_mask", DType::uint8, {32, 32}}, {"l.weight_orig", DType::float32, {32, 32}}},
      {{"bn.num_batches_tracked", DType::int64, {}}, {"bn.running_mean", DType::float32, {64}}},
      {{"e.token_type_ids", DType::int64, {1, 512}}, {"e.scale", DType::float32, {1}}},
      {{"fake.zero_point", DType::int32, {64}}, {"fake.scale", DType::float32, {64}}},
      {{"smpl.faces_tensor", DType::int64, {13776, 3}},
       {"smpl.v_template", DType::float32, {6890, 3}}},
      {{"gate.tid2eid", DType::int32, {1000, 6}},  // DeepSeek's routing by tokens
       {"gate.weight", DType::float32, {64, 32}},
       {"gate.e_score_correction_bias", DType::float32, {64}}},
      {{"mlp._extra_state", DType::uint8, {1 << 17}},  // TransformerEngine
       {"mlp.layer_norm_weight", DType::bfloat16, {4096}}},
      {{"experts.up_blocks", DType::uint8, {4, 32, 2, 16}},  // gpt-oss
       {"experts.up_scales", DType::uint8, {4, 32, 2}},
       {"experts.up_bias", DType::bfloat16, {4, 32}}},
      {{"optim.state.w.state1", DType::uint8, {32, 32}},
       {"optim.state.w.exp_avg", DType::float32, {32, 32}}},
      {{"data.image", DType::uint8, {32, 32}}, {"data.target", DType::float32, {32, 32}}},
      {{"optim.rng", DType::uint8, {5056}}, {"optim.mean", DType::float32, {64}}},
      {{"codes", DType::uint8, {32, 32}}, {"mine", DType::float32, {32}}},
  };
  for (const std::vector<ShapedTensor>& model : models) {
    EXPECT_EQ(possible_scales(model), std::vector<std::string>()) << model.front().fqn;
  }
}

TEST(QuantizedTensorsTest, EightBitFloatsBesideScalesOfAnyNameMayBeCodes) {
  const auto doubts_of = [](const Tensors& tensors) {
    const CheckpointContents contents = contents_of(tensors);
    const QuantizedTensors quantized(contents);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
      if (quantized.find(i) == nullptr && quantized.doubt_in_words(i)) {
        names.push_back(contents.tensors[i].meta.fqn);
      }
    }
    return names;
  };
  for (const char* name : {"qscale_weight", "weights_scaling_factor", "scales", "weight_scales",
                           "scale_inv", "dequant_scale", "weight_scale_2"}) {
    const std::string scales = std::string("l.") + name;
    std::vector<std::string> both{scales, "l.weight"};
    std::ranges::sort(both);
    EXPECT_EQ(doubts_of({{"l.weight", DType::float8_e4m3fn},
                         {"l.bias", DType::bfloat16},
                         {scales, DType::float32},
                         {"norm.weight", DType::bfloat16}}),
              both)
        << name;
  }
  EXPECT_EQ(doubts_of({{"l.w", DType::float8_e5m2}, {"l.my_scales", DType::uint8}}),
            std::vector<std::string>{"l.w"});
  // Numbers that are stored in 8 bits.
  for (const Tensors& model :
       {Tensors{{"l.weight", DType::float8_e4m3fn}, {"l.logit_scale", DType::float8_e4m3fn}},
        Tensors{{"l.weight", DType::float8_e4m3fn}, {"l.bias", DType::float32}},
        Tensors{{"l.weight", DType::float8_e4m3fn}, {"m.scale", DType::float32}},
        Tensors{{"weight", DType::float8_e4m3fn}, {"scale", DType::float32}},
        Tensors{{"l.weight", DType::float32}, {"l.scale", DType::float32}}}) {
    EXPECT_EQ(doubts_of(model), std::vector<std::string>()) << model[1].first;
  }
}

TEST(QuantizedTensorsTest, TheMetadataOfAFileMayNameTheMethod) {
  CheckpointContents contents =
      contents_of({{"l.qweight", DType::int8}, {"l.smooth", DType::float32}});
  const auto unknown = [&](const std::string& key, const std::string& text) {
    contents.annotations = {{key, text}};
    return QuantizedTensors(contents).unknown_codes_in_words().value_or("");
  };
  EXPECT_EQ(unknown("quantization_config", R"({"method": "svdquant", "rank": 4})"),
            "quantized weights (svdquant in __metadata__) of a scheme that Tessera does not know, "
            "such as l.qweight (int8), so any tensor may be scales");
  EXPECT_NE(unknown("config", R"({"quantization_config": {"quant_method": "x"}})"), "");
  EXPECT_NE(unknown("quantization_config", R"({"bits": 4})"), "");
  EXPECT_EQ(unknown("quantization_config", "null"), "");
  EXPECT_EQ(unknown("quantization_config", "{}"), "");
  EXPECT_EQ(unknown("config", R"({"_class_name": "FluxTransformer2DModel"})"), "");
}

// Otherwise a cast of the checkpoint could take its codes for numbers.
TEST(QuantizationMethodTest, AConfigThatCannotBeReadIsAnError) {
  class Server final : public ForwardingFileSystem {
   public:
    using ForwardingFileSystem::ForwardingFileSystem;
    std::unique_ptr<ReadableFile> open(const std::string& path) const override {
      throw Error(ErrorKind::io, {.path = path}, "status 503");
    }
  };
  const test::TemporaryDirectory tmp;
  const Server server(FileSystem::posix());
  EXPECT_EQ(read_quantization_method(server, tmp.path()), "");
  test::write_file(tmp / "config.json", "{}");
  EXPECT_THAT([&] { read_quantization_method(server, tmp.path()); },
              test::ThrowsError(ErrorKind::io, "status 503"));
}

TEST(QuantizationMethodTest, IsReadFromConfigJsonInOrBesideTheCheckpoint) {
  const auto method_of = [](const std::string& config) {
    return read_quantization_method(test::MemoryFiles("dir", {{"config.json", config}}), "dir");
  };
  EXPECT_EQ(method_of(R"({"quantization_config": {"quant_method": "fp8"}})"), "fp8");
  EXPECT_EQ(method_of(R"({"text_config": {"quantization_config": {"quant_method": "awq"}}})"),
            "awq");
  EXPECT_EQ(method_of(R"({"a_config": {"llm_config": {"quantization_config":
                         {"quant_method": "fp8"}}}})"),
            "fp8");
  EXPECT_EQ(method_of(R"({"compression_config": {"quant_method": "compressed-tensors"}})"),
            "compressed-tensors");
  EXPECT_EQ(method_of(R"({"quantization_config": {"quant_algo": "NVFP4"}})"), "NVFP4");
  EXPECT_EQ(method_of(R"({"quantization": {"group_size": 64, "bits": 4}})"), "mlx");
  EXPECT_EQ(method_of(R"({"quip_params": {"codebook": "E8P12"}})"), "quip");
  EXPECT_EQ(method_of(R"({"anyprec": {"parent_precision": 8}})"), "anyprec");
  // The method is found also in JSON with Python's Infinity, and in a damaged file.
  EXPECT_EQ(method_of(R"({"limit": [0.0, Infinity], "quantization_config":
                         {"quant_method" : "modelopt"}})"),
            "modelopt");
  EXPECT_EQ(method_of(R"({"quantization_config": {"quant_method": "fp)"), "fp");
  EXPECT_EQ(method_of(R"({"quantization_config": {"quant_method")"), "");
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
