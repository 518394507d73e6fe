#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/reshard/executor.h"

namespace tessera::reshard {

/// How `config.json` of Hugging Face changes when its model is cast.
struct ConfigEdit {
  std::string text{};     // the edited configuration; empty: it stays as it is
  std::string what{};     // the edits: `text_config.torch_dtype: float32 to bfloat16`; empty: none
  std::string left{};     // members that keep another value: `text_config.dtype: "auto"`
  std::string why_not{};  // why it cannot be edited: `a byte order mark`; empty if it can
};

/// Puts the new dtype into the members `torch_dtype` and `dtype` of a configuration:
/// - at the top level, and in `a_config`, `a_config.b_config` and so on: instead of any floating
///   dtype, because there it is the dtype of the model;
/// - elsewhere: instead of a dtype that the tensors had;
/// - under `quantization_config`: never, because no cast changes codes; `left` omits these members.
/// `left` names the other members that keep another value, except null. No other byte changes.
ConfigEdit edit_config_dtype(std::string_view config, const CastDTypes& cast);

/// Returns the dtype that a configuration names for the model: `dtype` or `torch_dtype` at the top
/// level, else of the first part that has one (`text_config`). Nothing for a text that is not JSON,
/// for a quantized model, without such a key, and for `"auto"` and others that are no floats.
std::optional<DType> named_model_dtype(std::string_view config);

}  // namespace tessera::reshard
