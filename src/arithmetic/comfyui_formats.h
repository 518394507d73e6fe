#pragma once

#include <string_view>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::arithmetic {

/// The key in the `__metadata__` of safetensors under which ComfyUI describes quantized layers.
inline constexpr std::string_view kComfyUiMetadataKey = "_quantization_metadata";

/// Reports the layers that ComfyUI describes and that `only` selects, if codes times scales are not
/// their weights. Some formats rotate the weights, or store scales in the order of a kernel. The
/// description is JSON: in a tensor `X.comfy_quant` for each layer, or in the annotation
/// `_quantization_metadata` for all.
std::vector<formats::Finding> find_formats_of_comfyui(const formats::CheckpointReader& reader,
                                                      const NameSelection& only);

}  // namespace tessera::arithmetic
