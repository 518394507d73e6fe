#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::arithmetic {

/// The file of an adapter's configuration.
inline constexpr const char* kAdapterConfigName = "adapter_config.json";

/// The change that an adapter makes to one tensor of its base model. `tensor`, `down` and `up` are
/// indices of the adapter's tensors.
struct AdapterChange {
  enum class Kind {
    low_rank,  // adds scale * up * down
    scaled,    // adds scale * tensor (the bias of a low-rank layer)
    replaced,  // becomes the adapter's tensor (modules_to_save, trained biases)
  };

  std::string target;  // the base tensor's name, without a prefix that the base may have
  Kind kind = Kind::low_rank;
  std::size_t tensor = 0;        // for scaled and replaced
  std::size_t down = 0;          // lora_A
  std::size_t up = 0;            // lora_B
  bool is_copy_of_base = false;  // replaced: by the base's own weight, which PEFT stores for
                                 // embeddings beside their matrices
  bool is_second_name = false;   // the tensors have another name, which has a change too
  bool is_embedding = false;     // the change is then the transpose of up * down
  /// Whether `fan_in_fan_out` is true in the adapter's configuration: the layer stores its weight
  /// as [in, out], so that the change is the transpose of up * down.
  bool is_said_to_be_transposed = false;
  double scale = 1.0;
};

/// An open LoRA adapter of PEFT: a folder with `adapter_config.json` and the adapter's tensors.
struct LoraAdapter {
  std::unique_ptr<formats::CheckpointReader> reader;
  std::vector<AdapterChange> changes{};      // sorted by target
  std::vector<formats::Finding> problems{};  // tensors that cannot be merged, each with its name
  std::vector<std::string> left_out{};       // tensors that only training needs
  double scale = 1.0;  // as the caller gave it; AdapterChange::scale includes it
};

/// Opens the adapter at `path`: a folder, or a file in it. Multiplies all that the adapter adds to
/// weights by `scale`. `fs` must outlive the reader. Throws: Error(not_found) if there is no
/// adapter_config.json; Error(unsupported) if it is not plain LoRA; Error(corruption) naming the
/// error in the configuration; Error(mismatch) if the adapter has no tensors; what open_checkpoint
/// throws.
LoraAdapter open_lora_adapter(const FileSystem& fs, const std::string& path, double scale);

/// Returns a digest of an adapter's configuration; empty if its folder has none.
std::string adapter_config_digest(const FileSystem& fs, const std::string& path);

/// As `open_lora_adapter`, from an opened reader and the text of the configuration (JSON).
LoraAdapter read_lora_adapter(std::unique_ptr<formats::CheckpointReader> reader,
                              std::string_view config, const std::string& config_path,
                              double scale);

}  // namespace tessera::arithmetic
