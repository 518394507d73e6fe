#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "formats/deepspeed/copies.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/tensor_cuts.h"

namespace tessera::formats::deepspeed {

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
  std::size_t tensor;
  std::int64_t begin;
  std::int64_t numel;
  std::size_t rank;
};

/// A checkpoint of one or several model ranks ([Note: Model ranks], files.h). Reads what their
/// modules have beside trained parameters. Ranks are numbered as DeepSpeed numbers them: stages,
/// within them data ranks, within them tensor ranks.
class ModelRanksReader : public ModelStatesReader {
 protected:
  using ModelStatesReader::ModelStatesReader;

  /// Returns the number of tensor ranks that the model states say, else `otherwise`.
  /// Throws Error(corruption) if the number of model ranks cannot be right.
  std::size_t tensor_size(const File& model, std::size_t num_model_ranks,
                          std::size_t otherwise) const;
  /// Opens the files of model states, which are by model rank as in `ParallelFiles`.
  std::vector<std::vector<const File*>> open_models(
      const std::vector<std::vector<std::string>>& names);
  /// Takes the opened files. Requires: `num_tensor` divides their number; each model rank has one
  /// file or `num_data` files.
  void set_model_ranks(std::vector<std::vector<const File*>> models, std::size_t num_tensor,
                       std::size_t num_data);
  /// Reads how the tensor ranks cut parameters. Notes rules that are not applied.
  void read_cuts(const FileSystem& fs);
  /// Returns how the tensor ranks' parts of a parameter are joined. Remembers its rows of padding
  /// for a note. Requires: `cuts()`. Throws: what `TensorCuts::join` throws.
  Joint join(const std::string& name, const std::vector<Shape>& parts);
  /// Remembers, for a note, a parameter that no rule names although all tensor ranks have the same
  /// numbers, as far as their beginnings show. `parts`: by tensor rank.
  void check_rule(const std::string& name, const std::vector<std::vector<Run>>& parts);

  std::size_t rank_of(std::size_t stage, std::size_t data, std::size_t tensor) const {
    return (stage * num_data_ + data) * num_tensor_ + tensor;
  }
  std::size_t num_stages() const { return model_ranks_.size() / num_tensor_; }
  std::size_t num_tensor() const { return num_tensor_; }
  std::size_t num_data() const { return num_data_; }
  const std::optional<TensorCuts>& cuts() const { return cuts_; }
  std::set<std::string> buffers_of(std::size_t stage) const;

  /// Adds the pieces that a tensor rank's parts are of the whole.
  static void add_pieces(Tensor& tensor, const Joint& joint, std::size_t rank,
                         const std::vector<VectorPart>& parts);

  /// Adds the buffers, frozen parameters and ties in the modules of all model ranks, and in what
  /// `add_of_module` was given before. Notes what is rounded.
  void add_modules();
  /// Remembers an entry of a module or of a layer's file.
  void add_of_module(ModulePart part);
  /// Notes the padding that was left out, and parameters and rules that do not fit together.
  void note_rules();
  Copies& replicas() { return replicas_; }
  const Copies& replicas() const { return replicas_; }

  static constexpr std::int64_t kNumelThatTells = 8192;

 private:
  /// Whether `model.<name>` was added as a trained parameter.
  virtual bool is_trained(const std::string& name) const = 0;
  /// Compares a module's copy of a trained parameter with the weights, or remembers to do so.
  /// Returns whether its dtype differs.
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
  void add_rest(const std::vector<ModulePart>& parts);
  void add_frozen(const std::string& name, const std::vector<ModulePart>& parts);
  void add_replica(const std::string& name, const ModulePart& first, const ModulePart& again);
  void add_ties_of_parameters();

  std::size_t num_tensor_ = 1;
  std::size_t num_data_ = 1;
  std::vector<std::vector<const File*>> model_ranks_;  // each by data rank in ZeRO stage 3
  std::optional<TensorCuts> cuts_;
  std::map<std::string, std::vector<ModulePart>> rest_;
  std::set<std::string> rounded_;
  std::vector<std::string> without_rule_;  // frozen, read as whole: equal on all tensor ranks
  std::vector<std::string> equal_parts_;   // joined without a rule, equal on all tensor ranks
  // Vocabularies with more rows than original_vocab_size, or with fewer: each with its rows.
  std::vector<std::string> padded_;
  std::vector<std::string> short_of_rows_;
  std::int64_t vocabulary_size_ = 0;
  Copies replicas_{"replicas", "equal copies of a parameter on all ranks that have it",
                   "the copies of the first rank are read"};
};

}  // namespace tessera::formats::deepspeed
