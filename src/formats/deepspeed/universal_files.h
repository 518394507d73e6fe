#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "formats/torch_zip/torch_save_layout.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::deepspeed {

/// The files of a universal checkpoint, laid out before Tessera reads any byte of a tensor:
///
///     latest_universal                                             the name of the folder
///     global_step<n>_universal/
///       mp_rank_00_model_states.pt                                 buffers, values
///       zero_pp_rank_0_mp_rank_00_model_states.pt                  the values, for ZeRO stage 3
///       zero/optimizer_state.pt                                    groups, loss scale, step
///       zero/<fqn>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     for each trained parameter
///
/// A tensor can be in several files. The rules: docs/formats/deepspeed.md. Immutable; safe to
/// share between threads.
class UniversalFiles {
 public:
  /// The bytes of one storage of an archive: those of a tensor, or constant bytes.
  struct Storage {
    std::optional<std::size_t> tensor{};  // by index in the contents
    std::string bytes{};                  // if the storage is not a tensor's
  };
  /// Where a tensor's bytes go.
  struct Place {
    std::size_t file;
    std::size_t storage;
  };

  /// Requires: `values[i]` belongs to `contents.values[i]`.
  /// Throws: Error(unsupported) naming an entry that DeepSpeed cannot store.
  UniversalFiles(const CheckpointContents& contents, const std::vector<Value>& values,
                 const std::string& destination);

  std::size_t num_files() const { return files_.size(); }
  const std::string& path(std::size_t file) const { return files_[file].path; }
  std::set<std::string> paths() const;
  /// Returns the folders, parents before their subfolders.
  const std::vector<std::string>& folders() const { return folders_; }

  /// Returns the content of a text file; null if the file is an archive of torch.save.
  const std::string* text(std::size_t file) const;
  std::vector<Storage> storages(std::size_t file) const;
  /// Returns the layout of an archive. A shared pointer, because large layouts are kept here, while
  /// the many small layouts are computed again in each call.
  std::shared_ptr<const torch_zip::TorchSaveLayout> layout(std::size_t file) const;
  /// Returns all places of a tensor; at least one.
  const std::vector<Place>& places_of(std::size_t tensor) const { return places_[tensor]; }

 private:
  /// `{"cat_dim": 0, "param": tensor}`. The tensor is stored in `shape`, which has its numel.
  struct ParameterFile {
    std::size_t tensor;
    DType dtype;
    Shape shape;
  };
  /// A file that holds only the tensor, not in a dict.
  struct StepFile {
    std::size_t tensor;
    DType dtype;
    Shape shape;
  };
  /// As ParameterFile, but all elements of the tensor are one stored zero.
  struct ZerosFile {
    Shape shape;
  };
  struct TextFile {
    std::string text;
  };
  struct ArchiveFile {
    std::shared_ptr<const torch_zip::TorchSaveLayout> layout;
    std::vector<Storage> storages;
  };
  struct File {
    std::string path;
    std::variant<ParameterFile, StepFile, ZerosFile, TextFile, ArchiveFile> content;
  };
  class Builder;

  void add(std::string path, decltype(File::content) content);

  std::deque<File> files_;
  std::vector<std::string> folders_;
  std::vector<std::vector<Place>> places_;  // by tensor
};

}  // namespace tessera::formats::deepspeed
