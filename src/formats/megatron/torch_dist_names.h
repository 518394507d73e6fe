#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/shape.h"
#include "tessera/base/tensor_meta.h"

namespace tessera::formats::megatron {

/// In the name of an object, the text before the index of its shard: `rng_state/shard_0.0_1.1`.
inline constexpr std::string_view kShard = "/shard_";

/// Texts in names: before a layer's number; and what replaces `experts.local_experts.<number>.`.
inline constexpr std::string_view kLayers = "layers.";
inline constexpr std::string_view kStackedExperts = "experts.experts.";

/// The layer in a block that predicts further tokens (`mtp.layers.0.`): the name of the module in
/// newer versions, and the name in torch_dist, which has stayed.
inline constexpr std::string_view kMtpModule = ".mtp_model_layer.";
inline constexpr std::string_view kMtpStored = ".transformer_layer.";

/// The place of a weight in a torch_dist checkpoint. There, layers and experts are stacked: the
/// tensor `key` has the extra leading dimensions `stacked`, and the weight is its slice at
/// `index`.
struct TorchDistPlace {
  std::string key;                    // `decoder.layers.mlp.linear_fc1.weight`
  std::vector<std::int64_t> index{};  // of the layer, then of the expert
  std::vector<std::int64_t> stacked{};

  Shape shape_of(const Shape& weight) const;
};

/// How Megatron names the layers of a block.
enum class LayerNames {
  stacked_if_alike,  // one tensor holds a weight of all layers, if all layers have the same weights
  numbered,          // each layer has its own tensors, also if the layers are alike
};

/// Maps the weights' names in the model's `state_dict` to their names in its `sharded_state_dict`.
/// Source: megatron-core 0.16, transformer/transformer_block.py,
/// transformer/moe/experts.py, models/gpt/gpt_layer_specs.py. Immutable.
class TorchDistNames {
 public:
  /// `weights`: of the model, by their names as `GPTModel.state_dict()` has them.
  /// Throws: Error(unsupported) naming a weight of an expert if the experts of its layer are not
  /// numbered from 0 without holes, or differ in shape or dtype.
  TorchDistNames(const std::map<std::string, TensorMeta>& weights, const std::string& destination,
                 LayerNames layer_names = LayerNames::stacked_if_alike);

  /// Returns where a weight goes. A norm can have one name in TransformerEngine's layers and
  /// another in Megatron's own: then it goes to both.
  const std::vector<TorchDistPlace>& places_of(const std::string& weight) const {
    return places_.at(weight);
  }
  /// Whether layers are stacked: those of all blocks are alike, and they need no numbers.
  bool are_layers_stacked() const { return are_layers_stacked_; }
  /// Returns the names of the objects that Megatron expects for the extra state of linear layers:
  /// `decoder.layers.mlp.linear_fc1._extra_state/shard_0_4`.
  std::vector<std::string> extra_states() const;

 private:
  std::map<std::string, std::vector<TorchDistPlace>> places_;
  bool are_layers_stacked_ = true;
};

}  // namespace tessera::formats::megatron
