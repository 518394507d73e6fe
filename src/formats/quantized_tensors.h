#pragma once

#include <compare>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// A tensor that is a part of a quantized weight. Its elements are not the weight's numbers.
struct QuantizedPart {
  std::string_view role;    // `codes`, `scales`, `zero points`, …
  std::string_view scheme;  // `block-scaled fp8`, `mxfp4`, `GPTQ or AWQ`, …
  std::size_t partner;      // index of the scales if this is `codes`, else of the codes
};

inline constexpr std::string_view kCodesRole = "codes";
/// The role of a tensor by which a layer multiplies its input (AWQ of ModelOpt). The weight's
/// columns were divided by it before they were quantized.
inline constexpr std::string_view kInputFactorsRole = "factors of inputs";
inline constexpr std::string_view kInputFactorsSuffix = "pre_quant_scale";
/// The role of two matrices whose product is added to the weight (SVDQuant of ModelOpt).
inline constexpr std::string_view kLowRankRole = "low-rank part";

/// Says that a tensor, such as scales, belongs to certain codes. A tied tensor may belong to
/// several codes, and tied codes may have several tensors of one role.
struct QuantizedLink {
  std::size_t codes;   // index of the codes
  std::size_t tensor;  // index of the tensor
  std::string_view role;

  auto operator<=>(const QuantizedLink&) const = default;
};

/// The quantized weights of a checkpoint. A weight is recognised by the names and dtypes of its
/// tensors. For example, `X.weight` in float8_e4m3fn is a quantized weight if the checkpoint also
/// has `X.weight_scale_inv`. Without such a tensor, `X.weight` is an ordinary tensor, unless
/// `doubt_in_words` says otherwise.
/// docs/formats/safetensors.md has the table of schemes. Keeps a view of the contents, which must
/// outlive it. Immutable, so thread-safe.
class QuantizedTensors {
 public:
  /// Looks for the quantized weights. `method` is what read_quantization_method returned: for
  /// messages and for doubt_in_words. If it is empty, the method in `contents.annotations` counts
  /// (quantization_method_in). Cost: O(n log n) for n tensors.
  explicit QuantizedTensors(const CheckpointContents& contents, std::string method = {});

  bool empty() const { return parts_.empty(); }
  /// Returns which part of a quantized weight a tensor is; nullptr if its elements are ordinary
  /// numbers.
  const QuantizedPart* find(std::size_t tensor_index) const;
  /// Returns whether the elements of a tensor are codes.
  bool are_codes(std::size_t tensor_index) const;
  /// Returns why a tensor that is no QuantizedPart may be codes or scales: `float8_e4m3fn of a
  /// model that config.json calls quantized (fbgemm), …`; otherwise nothing. Without a method, a
  /// floating-point tensor may be scales, or a table, if its module has integers that may be codes:
  /// matrices, not of int64 and not named as masks, positions or states. Its name must be one of
  /// scales; or the module has no floating-point `weight` and no known scheme, and the tensor is no
  /// `bias` and has fewer elements than the integers.
  std::optional<std::string> doubt_in_words(std::size_t tensor_index) const;
  /// Returns why no tensor of the checkpoint is surely an ordinary one: `method` is given, there
  /// are integers that may be codes, and no quantized weight is recognised. Otherwise nothing.
  std::optional<std::string> unknown_codes_in_words() const;
  /// Returns the scheme, with the method that config.json names: `mxfp4`, `scaled fp8 (fp8 in
  /// config.json)`.
  std::string scheme_in_words(const QuantizedPart& part) const;
  /// Describes a part: `codes of block-scaled fp8; the scales are X.weight_scale_inv`, or `scales
  /// of block-scaled fp8; the codes are X.weight`. Requires: `find` returned `part`.
  std::string in_words(const QuantizedPart& part) const;
  /// Returns all links, sorted by the index of the codes.
  const std::set<QuantizedLink>& links() const { return links_; }
  /// Returns the name of the part's partner. Requires: `find` returned `part`.
  const std::string& partner_name(const QuantizedPart& part) const;

  /// The names of all tensors and aliases, each with the index of its tensor.
  using Names = std::map<std::string, std::size_t, std::less<>>;

 private:
  /// Adds the further tensors of a weight. `part` describes them, except for their role.
  void add_companions(const Names& names, const std::string& base, QuantizedPart part);
  void add_marker_of_comfyui(const Names& names);
  /// Returns whether a tensor of any name may belong to `codes` in its module: the module has them
  /// in place of a floating-point `weight`.
  bool may_belong_to(std::size_t codes, const TensorMeta& meta, std::string_view module) const;
  /// Fills `scaled_float8_`.
  void find_scaled_float8();
  /// Does what `doubt_in_words` does for modules in `scaled_float8_`: a matrix of 8-bit floats may
  /// be codes, and a floating-point tensor with a name of scales may be scales.
  std::optional<std::string> doubt_about_float8(const TensorMeta& meta) const;
  std::string method_in_words() const;

  const CheckpointContents& contents_;
  std::string method_;
  std::string_view place_of_method_ = "config.json";
  // Key: a module with integers that may be codes. Value: the index of such integers, if possible
  // of some that belong to no known scheme.
  std::map<std::string_view, std::size_t> possible_codes_;
  /// Tensors of one module, as indices, that are no QuantizedPart.
  struct ScaledFloat8 {
    std::optional<std::size_t> codes;   // a matrix of 8-bit floats
    std::optional<std::size_t> scales;  // of another dtype, with `scal` in the last key of its name
  };
  std::map<std::string_view, ScaledFloat8> scaled_float8_;  // key: a module that has both
  std::map<std::size_t, QuantizedPart> parts_;              // key: index of the tensor
  std::set<QuantizedLink> links_;
};

}  // namespace tessera::formats
