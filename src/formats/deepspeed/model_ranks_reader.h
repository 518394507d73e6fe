#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/tensor_cuts.h"
#include "formats/torch_files/copies.h"
#include "formats/torch_files/rank_containers.h"

namespace tessera::formats::deepspeed {

using torch_files::Copies;

/// An entry of a module or of a layer, on one rank.
struct ModulePart {
  const File* file;
  const Entry* entry;
  std::size_t rank;
  std::size_t tensor;  // tensor rank
  KeyPath path;        // in the checkpoint
};

/// The elements [begin, begin + numel) of a flat vector in a file. A list of such parts, one after
/// the other, makes a tensor.
struct VectorPart {
  const File* file;
  std::size_t tensor;  // index of the vector in the file
  std::int64_t begin;
  std::int64_t numel;
  std::size_t rank;
};

/// The base class of readers of one or several model ranks ([Note: Model ranks], files.h). Reads
/// all in the ranks' modules except the trained parameters. Ranks are numbered as in DeepSpeed:
/// the tensor rank changes fastest, then the data rank, then the stage (`rank_of`).
class ModelRanksReader : public ModelStatesReader {
 protected:
  using ModelStatesReader::ModelStatesReader;

  /// Returns the number of tensor ranks that `model` records; `otherwise` if it records none.
  /// Throws Error(corruption) if `num_model_ranks` is not that number times the number of stages.
  std::size_t tensor_size(const File& model, std::size_t num_model_ranks,
                          std::size_t otherwise) const;
  /// Opens files of model states. `names`, and the result: in the order of `ParallelFiles::model`.
  std::vector<std::vector<const File*>> open_models(
      const std::vector<std::vector<std::string>>& names);
  /// Takes the opened files, by model rank. Requires: the number of model ranks is a multiple of
  /// `num_tensor`; each model rank has one file or `num_data` files.
  void set_model_ranks(std::vector<std::vector<const File*>> models, std::size_t num_tensor,
                       std::size_t num_data);
  /// Sets `cuts()`; throws what `TensorCuts` throws. Adds notes about rules that are not applied.
  void read_cuts(const FileSystem& fs);
  /// Returns how the tensor ranks' parts of a parameter are joined. Remembers padding and missing
  /// rows for a note. Requires: `cuts()` has a value. Throws: what `TensorCuts::join` throws.
  Joint join(const std::string& name, const std::vector<Shape>& parts);
  /// Compares the first numbers of a parameter on all tensor ranks (`parts`, by tensor rank). If
  /// they are equal and no rule names the parameter, remembers the parameter for a note.
  void check_rule(const std::string& name, const std::vector<std::vector<Run>>& parts);

  std::size_t rank_of(std::size_t stage, std::size_t data, std::size_t tensor) const {
    return (stage * num_data_ + data) * num_tensor_ + tensor;
  }
  std::size_t num_stages() const { return model_ranks_.size() / num_tensor_; }
  std::size_t num_tensor() const { return num_tensor_; }
  std::size_t num_data() const { return num_data_; }
  const std::optional<TensorCuts>& cuts() const { return cuts_; }
  std::set<std::string> buffers_of(std::size_t stage) const;

  /// Adds the parts of tensor rank `rank` to `tensor`, as pieces of the whole tensor.
  static void add_pieces(Tensor& tensor, const Joint& joint, std::size_t rank,
                         const std::vector<VectorPart>& parts);

  /// Adds buffers, frozen parameters and ties: those in the modules of all model ranks, and those
  /// that `add_of_module` remembered. Adds notes about rounded copies and names without elements.
  void add_modules();
  /// Remembers an entry for `add_modules`. For a trained parameter, only calls `is_rounded_copy`.
  void add_of_module(ModulePart part);
  /// Adds notes about padding, parameters without a rule, and the user's patterns that no parameter
  /// uses.
  void note_rules();
  Copies& replicas() { return replicas_; }
  const Copies& replicas() const { return replicas_; }

  static constexpr std::int64_t kNumelThatTells = 8192;  // numbers of a tensor to compare

 private:
  /// Whether `model.<name>` was added as a trained parameter.
  virtual bool is_trained(const std::string& name) const = 0;
  /// Returns whether a module's copy of a trained parameter has another dtype than the weights. May
  /// also remember the copy, of any dtype, to compare it with the weights later.
  virtual bool is_rounded_copy(const std::string& name, const ModulePart& copy) = 0;

  void note_unknown_members();
  void note_other_rules();
  void note_padding();
  bool is_parameter(const std::string& name) const;
  const File& model_of(std::size_t stage, std::size_t tensor) const {
    return *model_ranks_[stage * num_tensor_ + tensor].front();
  }
  void add_frozen_of_stage_3();
  void add_frozen_fragments(const std::string& name);
  std::vector<VectorPart> fragments_of(const std::string& name, std::size_t tensor,
                                       std::int64_t numel) const;
  void keep_apart();
  void add_rest(const std::vector<ModulePart>& parts);
  void add_frozen(const std::string& name, const std::vector<ModulePart>& parts);
  void add_replica(const std::string& name, const ModulePart& first, const ModulePart& again);
  void add_ties_of_parameters();

  std::size_t num_tensor_ = 1;
  std::size_t num_data_ = 1;
  std::vector<std::vector<const File*>> model_ranks_;  // each by data rank in ZeRO stage 3
  std::optional<TensorCuts> cuts_;
  std::map<std::string, std::vector<ModulePart>> rest_;  // what add_of_module remembered, by name
  std::map<std::size_t, torch_files::Containers> containers_;  // of rest_, by rank
  std::set<std::string> rounded_;
  std::vector<std::string> without_rule_;  // frozen, no rule; equal on all ranks, so read as whole
  std::vector<std::string> equal_parts_;   // joined without a rule, but equal on all tensor ranks
  // Names of vocabularies with more, or fewer, rows than original_vocab_size, and their rows.
  std::vector<std::string> padded_;
  std::vector<std::string> short_of_rows_;
  std::int64_t vocabulary_size_ = 0;
  Copies replicas_{"replicas", "equal copies of a parameter on all ranks that have it",
                   "the copies of the first rank are read"};
};

}  // namespace tessera::formats::deepspeed
