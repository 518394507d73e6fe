#include "formats/quantized_tensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "formats/pointwise_state.h"
#include "formats/quantization_method.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

/// A set of dtypes.
class DTypes {
 public:
  constexpr DTypes(std::initializer_list<DType> dtypes) {
    for (const DType dtype : dtypes) bits_ |= 1U << static_cast<unsigned>(dtype);
  }
  constexpr bool contain(DType dtype) const {
    return (bits_ >> static_cast<unsigned>(dtype) & 1U) != 0;
  }

 private:
  std::uint32_t bits_ = 0;
};

constexpr DTypes kFloat8 = {DType::float8_e4m3fn, DType::float8_e5m2, DType::float8_e4m3fnuz,
                            DType::float8_e5m2fnuz};
constexpr DTypes kFloats = {DType::float16, DType::bfloat16, DType::float32, DType::float64};
constexpr DTypes kPowersOfTwo = {DType::uint8, DType::float8_e8m0fnu};  // exponents
constexpr DTypes kPackedIntegers = {DType::uint8, DType::int32};
constexpr DTypes kSignedIntegers = {DType::int8, DType::int16, DType::int32, DType::int64};
constexpr DTypes kTorchaoCodes = {
    DType::int8,        DType::uint8,           DType::int32,           DType::float8_e4m3fn,
    DType::float8_e5m2, DType::float8_e4m3fnuz, DType::float8_e5m2fnuz, DType::float4_e2m1fn_x2};
constexpr DTypes kFloatsOf8BitsOrMore = {
    DType::float16, DType::bfloat16,       DType::float32,      DType::float64,
    DType::uint8,   DType::float8_e8m0fnu, DType::float8_e4m3fn};
constexpr DTypes kCodeDTypes = {DType::float8_e8m0fnu, DType::float4_e2m1fn_x2};
// Dtypes in which codes are stored, but seldom the ids and positions of a model that has no codes.
constexpr DTypes kPossibleCodes = {DType::uint8,  DType::int8,  DType::int16,
                                   DType::uint16, DType::int32, DType::uint32};
constexpr DTypes kPackedFloat4 = {DType::uint8, DType::float4_e2m1fn_x2};

/// How the tensors of a quantized weight are named: a base that they share, and a suffix each.
struct Scheme {
  std::string_view name;
  std::string_view codes_suffix;
  DTypes codes_dtypes;
  std::string_view scales_suffix;
  DTypes scales_dtypes;
  std::string_view marker_suffix{};  // of a tensor or value that must exist too; empty: none
};

constexpr std::string_view kSchemeOfComfyUi = "scaled fp8 of ComfyUI";

// In this order: the first scheme that fits a weight is used.
constexpr std::array kSchemes = {
    Scheme{"block-scaled fp8",
           "",
           kFloat8,
           "_scale_inv",
           {DType::float16, DType::bfloat16, DType::float32, DType::uint8, DType::float8_e8m0fnu}},
    Scheme{"block-scaled fp8",
           ".weight",
           kFloat8,
           ".scale",
           {DType::bfloat16, DType::float32, DType::float8_e8m0fnu}},
    Scheme{"scaled fp8", "", kFloat8, "_scale", kFloats},
    Scheme{"mxfp8", "", kFloat8, "_scale", kPowersOfTwo},
    Scheme{"mxfp4", "_blocks", kPackedFloat4, "_scales", kPowersOfTwo},
    Scheme{"mxfp4", "_packed", kPackedFloat4, "_scale", kPowersOfTwo},
    Scheme{"mxfp4", "", kPackedFloat4, "_scale", kPowersOfTwo},
    Scheme{"nvfp4", "_packed", kPackedFloat4, "_scale", {DType::float8_e4m3fn}},
    Scheme{"nvfp4", "", kPackedFloat4, "_scale", {DType::float8_e4m3fn}},
    Scheme{"compressed-tensors packed integers", "_packed", {DType::int32}, "_scale", kFloats},
    Scheme{"scaled int8", "", {DType::int8}, "_scale", kFloats},
    Scheme{"GPTQ or AWQ", "qweight", {DType::int32}, "scales", kFloats},
    Scheme{"bitsandbytes int8", "weight", {DType::int8}, "SCB", kFloats},
    // bitsandbytes packs its codes into any dtype that FSDP can shard (bnb_4bit_quant_storage).
    Scheme{"bitsandbytes 4-bit",
           "",
           {DType::uint8, DType::float16, DType::bfloat16, DType::float32},
           ".absmax",
           {DType::float32, DType::uint8}},
    Scheme{"EETQ int8", "", {DType::int8}, "_scales", kFloats},
    Scheme{"EETQ int8", "qweight", {DType::int8}, "weight_scales", kFloats},
    Scheme{"BitNet or packed int4", "", {DType::uint8}, "_scale", kFloats},
    Scheme{"MLX integers", "weight", {DType::uint32}, "scales", kFloatsOf8BitsOrMore},
    Scheme{"AQLM", "codes", kSignedIntegers, "scales", kFloats, "codebooks"},
    // An ordinary attention module may have floating-point tensors `W_q` and `scale`. So if `W_q`
    // is floating-point, the weight is quantized only if the marker `view_as_float` is there.
    Scheme{"HQQ", "W_q", kPackedIntegers, "scale", kFloats},
    Scheme{"HQQ", "W_q", kFloats, "scale", kFloats, "view_as_float"},
    Scheme{"HQQ", "W_q", kPackedIntegers, "meta.scale", kFloats},
    Scheme{"HQQ", "W_q", kFloats, "meta.scale", kFloats, "meta.view_as_float"},
    Scheme{"HQQ", "W_q", kPackedIntegers, "zero_scale", kFloats},
    Scheme{"HQQ", "W_q", kPackedIntegers, "scale_q", {DType::uint8}},
    Scheme{"HQQ", "W_q", kPackedIntegers, "meta.scale_q", {DType::uint8}},
    Scheme{kSchemeOfComfyUi, "weight", kFloat8, "scale_weight", kFloats},
    Scheme{"quanto", "._data", {DType::int8, DType::uint8}, "._scale", kFloats},
    Scheme{"quanto", "._data", kFloat8, "._scale", kFloats},
    Scheme{"quanto", "._data._data", {DType::uint8}, "._scale", kFloats},
    Scheme{"torchao", "_qdata", kTorchaoCodes, "_scale", kFloatsOf8BitsOrMore},
    Scheme{"torchao", "_qdata", kTorchaoCodes, "_scale_and_zero", kFloats},
    Scheme{"torchao", "_qdata", kTorchaoCodes, "_group_scale", kFloatsOf8BitsOrMore},
};

/// A further tensor that a quantized weight may have, besides codes and scales.
struct Companion {
  std::string_view suffix;
  std::string_view role;
};

// Companions whose name is the weight's base (Scheme), then the suffix.
constexpr std::array kCompanions = {
    Companion{"_scale_2", "second scales"},
    Companion{"_global_scale", "second scales"},
    Companion{"_zero_point", "zero points"},
    Companion{"_offset", "offsets"},
    Companion{"_shape", "shape"},
    Companion{"_g_idx", "group indices"},
    Companion{"qzeros", "zero points"},
    Companion{"g_idx", "group indices"},
    Companion{"weight_format", "format"},
    Companion{".quant_map", "code book"},
    Companion{".nested_absmax", "second scales"},
    Companion{".nested_quant_map", "second code book"},
    Companion{".quant_state.bitsandbytes__nf4", "description"},
    Companion{".quant_state.bitsandbytes__fp4", "description"},
    Companion{"biases", "offsets"},
    Companion{"codebooks", "code book"},
    Companion{"zero", "zero points"},
    Companion{"meta.zero", "zero points"},
    Companion{"zero_q", "zero points"},
    Companion{"meta.zero_q", "zero points"},
    Companion{"meta_scale.scale", "second scales"},
    Companion{"meta_scale.zero", "second scales"},
    Companion{"meta_zero.scale", "scales of zero points"},
    Companion{"meta_zero.zero", "scales of zero points"},
    Companion{"meta.meta_scale.scale", "second scales"},
    Companion{"meta.meta_scale.zero", "second scales"},
    Companion{"meta.meta_zero.scale", "scales of zero points"},
    Companion{"meta.meta_zero.zero", "scales of zero points"},
    Companion{"scale_input", "scales of inputs"},
    Companion{"._shift", "zero points"},
    Companion{"_per_tensor_scale", "second scales"},
    Companion{"_row_scale", "second scales"},
    Companion{"_group_zero", "zero points"},
    Companion{"_activation_scale", "scales of inputs"},
    Companion{"_act_per_tensor_scale", "scales of inputs"},
    Companion{"_act_pre_scale", "scales of inputs"},
};

// Companions whose name is the name of the weight's module, then a dot and the suffix.
constexpr std::array kCompanionsInModule = {
    Companion{"input_scale", "scales of inputs"},
    Companion{"input_global_scale", "scales of inputs"},
    Companion{"input_activation_scale", "scales of inputs"},
    Companion{"activation_scale", "scales of inputs"},
    Companion{"output_scale", "scales of outputs"},
    Companion{"output_activation_scale", "scales of outputs"},
    Companion{"input_zero_point", "zero points of inputs"},
    Companion{"output_zero_point", "zero points of outputs"},
    Companion{kInputFactorsSuffix, kInputFactorsRole},
    Companion{"svdquant_lora_a", kLowRankRole},
    Companion{"svdquant_lora_b", kLowRankRole},
    Companion{"comfy_quant", "description"},
};

/// The name of a tensor that ComfyUI looks for, once per model. It has the dtype of the codes.
constexpr std::string_view kMarkerOfComfyUi = "scaled_fp8";

/// Returns what comes after the last dot.
std::string_view last_key(std::string_view name) {
  return name.substr(name.rfind('.') + 1);  // npos + 1 is 0
}

/// Returns whether a tensor of this name in a quantized model may be scales, zero points or a code
/// book, also of a scheme that is not in kSchemes.
bool is_name_of_scales(std::string_view fqn) {
  constexpr std::array<std::string_view, 21> kOthers = {
      "s",         "suh",       "svh",         "tables",        "tables2",  "codebook",
      "codebooks", "centroids", "absmax",      "smooth_factor", "SCB",      "zero",
      "zeros",     "qzeros",    "quant_map",   "res_centroids", "col_vals", "SU",
      "SV",        "tlut",      "lookup_table"};
  std::string_view key = last_key(fqn);
  if (key == "weight" && fqn.ends_with("centroids.weight")) return true;  // VPTQ
  return key.find("scal") != std::string_view::npos ||                    // scale, scaling_factor
         std::ranges::find(kOthers, key) != kOthers.end();
}

/// Returns the name of the module that a tensor belongs to: `l` for `l.suh`, and for VPTQ's
/// `l.centroids.weight` and `l.res_centroids.weight`, whose codes are in `l`.
std::string_view module_of(std::string_view fqn) {
  if (fqn.ends_with("centroids.weight")) fqn.remove_suffix(std::string_view(".weight").size());
  return fqn.substr(0, fqn.size() - last_key(fqn).size());
}

/// Returns whether a tensor has the name of a mask, of positions or of a state, which models have
/// as integers although they are not quantized: GPT-2's `attn.bias`, Swin's
/// `relative_position_index`, TransformerEngine's `_extra_state`.
bool is_name_of_other_integers(std::string_view key) {
  constexpr std::array<std::string_view, 6> kWords = {"mask", "index", "position",
                                                      "_ids", "_idx",  "_state"};
  return key == "bias" || std::ranges::any_of(kWords, [&](std::string_view word) {
           return key.find(word) != std::string_view::npos;
         });
}

/// Returns whether a tensor may hold codes of a scheme that is not in kSchemes.
bool may_be_unknown_codes(const TensorMeta& meta) {
  // Longer than the state of a random number generator, or the order of a layer's columns.
  constexpr std::int64_t kMinNumelOfRow = std::int64_t{1} << 16;
  const std::string_view key = last_key(meta.fqn);
  const bool is_of_spqr_or_quip = key == "dense_weights" || key.starts_with("Qidxs");
  const bool has_dtype =
      kPossibleCodes.contain(meta.dtype) || (meta.dtype == DType::int64 && is_of_spqr_or_quip);
  const bool is_large = meta.shape.size() > 1 || meta.numel() >= kMinNumelOfRow;
  return has_dtype && is_large && !is_name_of_other_integers(key);
}

using Names = QuantizedTensors::Names;

Names names_of(const CheckpointContents& contents) {
  Names names;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    names.emplace(contents.tensors[i].meta.fqn, i);
  }
  for (const Alias& alias : contents.aliases) {
    const auto target = names.find(alias.target);
    if (target != names.end()) names.emplace(alias.fqn, target->second);
  }
  return names;
}

std::optional<std::size_t> index_of(const Names& names, const std::string& fqn) {
  const auto found = names.find(fqn);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

/// Says whether a weight with this base has the marker that its scheme needs.
bool has_marker(const CheckpointContents& contents, const Names& names, const Scheme& scheme,
                const std::string& base) {
  if (scheme.marker_suffix.empty()) return true;
  const std::string marker = base + std::string(scheme.marker_suffix);
  return names.contains(marker) ||
         std::ranges::binary_search(contents.values, marker, {}, &ValueEntry::name);
}

/// Returns the index of the tensor with the codes, if the tensor `scales` holds the scales of
/// `scheme`.
std::optional<std::size_t> codes_of(const CheckpointContents& contents, const Names& names,
                                    const TensorMeta& scales, const Scheme& scheme,
                                    const std::string& base) {
  if (!scheme.scales_dtypes.contain(scales.dtype)) return std::nullopt;
  const auto codes = index_of(names, base + std::string(scheme.codes_suffix));
  if (!codes || !scheme.codes_dtypes.contain(contents.tensors[*codes].meta.dtype)) {
    return std::nullopt;
  }
  return has_marker(contents, names, scheme, base) ? codes : std::nullopt;
}

}  // namespace

QuantizedTensors::QuantizedTensors(const CheckpointContents& contents, std::string method)
    : contents_(contents), method_(std::move(method)) {
  if (method_.empty()) {
    method_ = quantization_method_in(contents.annotations);
    place_of_method_ = "__metadata__";
  }
  const Names names = names_of(contents);
  for (const auto& [name, i] : names) {
    for (const Scheme& scheme : kSchemes) {
      if (!name.ends_with(scheme.scales_suffix)) continue;
      const std::string base = name.substr(0, name.size() - scheme.scales_suffix.size());
      const auto codes = codes_of(contents, names, contents.tensors[i].meta, scheme, base);
      if (!codes) continue;
      parts_.insert_or_assign(*codes, QuantizedPart{kCodesRole, scheme.name, i});
      parts_.insert_or_assign(i, QuantizedPart{"scales", scheme.name, *codes});
      links_.insert({*codes, i, "scales"});
      add_companions(names, base, QuantizedPart{"", scheme.name, *codes});
      break;
    }
  }
  add_marker_of_comfyui(names);
  find_scaled_float8();
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorMeta& meta = contents.tensors[i].meta;
    const std::string_view module = module_of(meta.fqn);
    if (module.empty() || !may_be_unknown_codes(meta)) continue;
    const auto [known, is_new] = possible_codes_.emplace(module, i);
    if (!is_new && find(known->second) != nullptr) known->second = i;
  }
}

void QuantizedTensors::find_scaled_float8() {
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    const TensorMeta& meta = contents_.tensors[i].meta;
    const std::string_view module = module_of(meta.fqn);
    if (module.empty() || find(i) != nullptr) continue;
    if (kFloat8.contain(meta.dtype)) {
      if (meta.shape.size() > 1) scaled_float8_[module].codes = i;
    } else if (last_key(meta.fqn).find("scal") != std::string_view::npos &&
               (kFloats.contain(meta.dtype) || kPowersOfTwo.contain(meta.dtype))) {
      scaled_float8_[module].scales = i;
    }
  }
  std::erase_if(scaled_float8_,
                [](const auto& each) { return !each.second.codes || !each.second.scales; });
}

void QuantizedTensors::add_companions(const Names& names, const std::string& base,
                                      QuantizedPart part) {
  const auto add = [&](const std::string& name, std::string_view role) {
    const auto tensor = index_of(names, name);
    part.role = role;
    if (!tensor) return;
    parts_.emplace(*tensor, part);
    links_.insert({part.partner, *tensor, role});
  };
  for (auto name = names.lower_bound(base); name != names.end(); ++name) {
    if (!name->first.starts_with(base)) break;
    const std::string_view suffix = std::string_view(name->first).substr(base.size());
    const auto companion = std::ranges::find(kCompanions, suffix, &Companion::suffix);
    if (companion != kCompanions.end()) add(name->first, companion->role);
  }
  const std::string module = base.substr(0, base.size() - last_key(base).size());
  for (const Companion& companion : kCompanionsInModule) {
    add(module + std::string(companion.suffix), companion.role);
  }
}

void QuantizedTensors::add_marker_of_comfyui(const Names& names) {
  const auto weight = std::ranges::find_if(parts_, [](const auto& part) {
    return part.second.role != kCodesRole && part.second.scheme == kSchemeOfComfyUi;
  });
  if (weight == parts_.end()) return;
  const std::size_t codes = weight->second.partner;
  for (const auto& [name, tensor] : names) {
    if (last_key(name) != kMarkerOfComfyUi) continue;
    parts_.emplace(tensor, QuantizedPart{"marker", kSchemeOfComfyUi, codes});
  }
}

const QuantizedPart* QuantizedTensors::find(std::size_t tensor_index) const {
  const auto part = parts_.find(tensor_index);
  return part == parts_.end() ? nullptr : &part->second;
}

bool QuantizedTensors::are_codes(std::size_t tensor_index) const {
  const QuantizedPart* const part = find(tensor_index);
  return part != nullptr && part->role == kCodesRole;
}

std::optional<std::string> QuantizedTensors::doubt_in_words(std::size_t tensor_index) const {
  const TensorMeta& meta = contents_.tensors[tensor_index].meta;
  const std::string dtype(dtype_name(meta.dtype));
  if (auto doubt = doubt_about_float8(meta); doubt && method_.empty()) return doubt;
  const bool may_be_codes = kFloat8.contain(meta.dtype) || kCodeDTypes.contain(meta.dtype);
  const bool may_be_scales = kFloats.contain(meta.dtype) && is_name_of_scales(meta.fqn);
  if (!method_.empty() && (may_be_codes || may_be_scales)) {
    return dtype + " of a model that " + std::string(place_of_method_) + " calls quantized (" +
           printable(method_) + "), which may be " + (may_be_codes ? "codes" : "scales");
  }
  const auto codes = possible_codes_.find(module_of(meta.fqn));
  if (codes == possible_codes_.end() ||
      !(may_be_scales || may_belong_to(codes->second, meta, codes->first))) {
    return std::nullopt;
  }
  const TensorMeta& beside = contents_.tensors[codes->second].meta;
  return dtype + " beside " + printable(beside.fqn) + " (" + std::string(dtype_name(beside.dtype)) +
         "), which may be scales of codes of a scheme that Tessera does not know";
}

bool QuantizedTensors::may_belong_to(std::size_t codes, const TensorMeta& meta,
                                     std::string_view module) const {
  const std::string_view key = last_key(meta.fqn);
  if (!is_floating_point(meta.dtype) || meta.shape.empty() || find(codes) != nullptr) return false;
  if (key == "weight" || key == "bias" || is_pointwise_name(key)) return false;
  if (contents_.tensors[codes].meta.numel() <= meta.numel()) return false;
  if (!method_.empty() && parts_.empty()) return false;  // unknown_codes_in_words says it once
  const TensorEntry* const weight = contents_.find_tensor(std::string(module) + "weight");
  return weight == nullptr || !is_floating_point(weight->meta.dtype);
}

std::optional<std::string> QuantizedTensors::doubt_about_float8(const TensorMeta& meta) const {
  const auto found = scaled_float8_.find(module_of(meta.fqn));
  if (found == scaled_float8_.end()) return std::nullopt;
  const bool may_be_codes = kFloat8.contain(meta.dtype) && meta.shape.size() > 1;
  if (!may_be_codes && !(kFloats.contain(meta.dtype) && is_name_of_scales(meta.fqn))) {
    return std::nullopt;
  }
  const auto& [codes, scales] = found->second;
  const TensorMeta& beside = contents_.tensors[may_be_codes ? *scales : *codes].meta;
  return std::string(dtype_name(meta.dtype)) + " beside " + printable(beside.fqn) + " (" +
         std::string(dtype_name(beside.dtype)) + "), which may be " +
         (may_be_codes ? "codes" : "scales") + " of a scheme that Tessera does not know";
}

std::optional<std::string> QuantizedTensors::unknown_codes_in_words() const {
  if (method_.empty() || !parts_.empty()) return std::nullopt;
  const auto codes = std::ranges::find_if(
      contents_.tensors, [](const TensorEntry& each) { return may_be_unknown_codes(each.meta); });
  if (codes == contents_.tensors.end()) return std::nullopt;
  return "quantized weights (" + method_in_words() +
         ") of a scheme that Tessera does not know, such as " + printable(codes->meta.fqn) + " (" +
         std::string(dtype_name(codes->meta.dtype)) + "), so any tensor may be scales";
}

std::string QuantizedTensors::method_in_words() const {
  return printable(method_) + " in " + std::string(place_of_method_);
}

std::string QuantizedTensors::scheme_in_words(const QuantizedPart& part) const {
  const std::string scheme(part.scheme);
  return method_.empty() ? scheme : scheme + " (" + method_in_words() + ")";
}

std::string QuantizedTensors::in_words(const QuantizedPart& part) const {
  return std::string(part.role) + " of " + scheme_in_words(part) + "; the " +
         (part.role == kCodesRole ? "scales" : "codes") + " are " + printable(partner_name(part));
}

const std::string& QuantizedTensors::partner_name(const QuantizedPart& part) const {
  return contents_.tensors[part.partner].meta.fqn;
}

}  // namespace tessera::formats
