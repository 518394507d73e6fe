#pragma once

#include <set>
#include <string>
#include <string_view>

#include "tessera/base/dtype.h"

namespace tessera::reshard {

/// The dtypes of the tensors that a move casts, and the dtype that they get.
struct CastDTypes {
  std::set<DType> from;
  DType to;
};

/// What becomes of a configuration of Hugging Face (`config.json`) when its model is cast.
struct ConfigEdit {
  std::string text{};     // the edited configuration; empty: it stays as it is
  std::string what{};     // the edits: `text_config.torch_dtype: float32 to bfloat16`; empty: none
  std::string left{};     // what keeps its value: `text_config.dtype: "auto"`; empty: none
  std::string why_not{};  // the configuration cannot be read: `a byte order mark`; else empty
};

/// Puts the new dtype into the members `torch_dtype` and `dtype` of a configuration. In the
/// outermost object, and in an object `…_config` directly inside such an object, this member states
/// the dtype of the model, so any other floating dtype is replaced. Elsewhere the member is
/// replaced only if it names a dtype that the tensors had. Any other value of such a member is
/// named in `left`, unless it is the new dtype already, or null. Everything under
/// `quantization_config` stays unchanged: it is about codes, which no cast changes. Every other
/// byte stays unchanged too.
ConfigEdit edit_config_dtype(std::string_view config, const CastDTypes& cast);

}  // namespace tessera::reshard
