#pragma once

namespace tessera::formats::megatron {

// The files of `torch_dist` beside those of DCP.
inline constexpr const char* kCommonFile = "common.pt";      // what all ranks have alike
inline constexpr const char* kConfigFile = "metadata.json";  // the name and version of the format

}  // namespace tessera::formats::megatron
