#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/weak_tensor.h"
#include "tessera/base/error.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/fsdp/fully_shard.h"

namespace tessera::fsdp {

/// A parameter in a flat parameter, with its name below the fully sharded module.
struct ManagedParameter {
  std::string fqn;
  at::Tensor tensor;
};
struct SharedParameter {  // a further name of a tied parameter
  std::string fqn;
  std::size_t index;  // index of the parameter that it is tied to
};

struct HandleOptions {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  std::shared_ptr<dist::Group> shard_group;
  /// A group of one rank if the strategy does not replicate.
  std::shared_ptr<dist::Group> replicate_group;
  std::shared_ptr<dist::Group> world_group;  // of all ranks of the mesh
  FreedParameters freed_parameters = FreedParameters::freed;
  Offload offload = Offload::none;
  /// For each rank of the shard group: the ranks of the mesh that hold the same shard.
  std::vector<std::vector<int>> holders{};
};

/// Describes the flat parameter of a handle (FlatParamHandle): its parameters, their positions in
/// it, and the ranks that share it. Owns no tensor: it holds the parameters weakly, because they
/// keep their handle alive. Only the name of the unit (the fully sharded module) can change. Not
/// thread-safe.
class FlatParamContents {
 public:
  /// Requires: at least one parameter; all have one dtype. `unit_name` is the unit's name so far.
  FlatParamContents(const std::string& unit_name, const std::vector<ManagedParameter>& parameters,
                    std::vector<SharedParameter> shared, HandleOptions options);

  const FlatUnit& unit() const { return unit_; }
  const std::vector<SharedParameter>& shared_parameters() const { return shared_; }
  const HandleOptions& options() const { return options_; }
  /// Returns the unit's name for messages: `layers.0`, `the root`.
  std::string display_name() const;
  void set_unit_name(const std::string& fqn) { unit_.name = fqn; }

  // --- parameters
  std::size_t num_parameters() const { return weak_parameters_.size(); }
  /// Returns the parameter, or an undefined tensor if the parameter was destroyed.
  at::Tensor parameter(std::size_t index) const { return weak_parameters_[index].lock(); }
  /// Returns the index of a parameter in this flat parameter.
  std::size_t index_of(const at::Tensor& parameter) const;
  /// Throws Error(kind) that names parameter `index`.
  [[noreturn]] void refuse(ErrorKind kind, std::size_t index, const std::string& expected,
                           const std::string& found, const std::string& likely_cause = {}) const;

  // --- ranks
  dist::Group& shard_group() const { return *options_.shard_group; }
  dist::Group& replicate_group() const { return *options_.replicate_group; }
  /// Returns into how many shards the flat parameter is cut, one per rank.
  std::int64_t num_shards() const { return shard_group().size(); }
  /// Returns whether each rank holds only a shard of the parameters.
  bool is_sharded() const { return shard_group().size() > 1; }
  /// Returns over how many ranks gradients are averaged.
  int num_averaged() const { return shard_group().size() * replicate_group().size(); }

  // --- dtypes
  /// Returns the parameters' own dtype.
  at::ScalarType own_dtype() const;
  /// Returns the dtype of gathered parameters.
  at::ScalarType param_dtype() const;
  /// Returns the dtype of gradients while they are averaged.
  at::ScalarType reduce_dtype() const;

  // --- places in a flat tensor
  /// Returns parameter `index`, in its full shape, as a view of `flat`. `flat`: [padded numel].
  at::Tensor full_view(const at::Tensor& flat, std::size_t index) const;
  /// Returns this rank's shard of parameter `index` as a view of `flat_shard`, [sharded_numel]. It
  /// is 1-d and may be empty; if there is one shard, it has the full shape.
  at::Tensor sharded_view(const at::Tensor& flat_shard, std::size_t index) const;
  /// Returns the index of the parameter that contains element `position` of the flat tensor.
  std::size_t parameter_at(std::int64_t position) const;
  /// Zeroes the gaps between parameters, and the end's padding, in a flat tensor of all parameters.
  void zero_padding(const at::Tensor& flat) const;

 private:
  FlatUnit unit_;
  std::vector<SharedParameter> shared_;
  HandleOptions options_;
  std::vector<WeakTensor> weak_parameters_;
};

}  // namespace tessera::fsdp
