#pragma once

#include <string>

namespace tessera::formats {

/// Whether a file of that name makes the files beside it a checkpoint, in any format: `index.h5`,
/// `.metadata`, `metadata.pkl`, an index of Hugging Face, `model.safetensors` or
/// `latest_universal`. It is written last and removed first.
bool is_index_name(const std::string& name);

/// Whether a file of that name, which Tessera writes into folders, can be opened without the files
/// beside it: `model.safetensors`, or a shard of it.
bool opens_alone(const std::string& name);

/// Whether Tessera's file of that name, in a folder without an index, may belong to a complete
/// checkpoint: files of ranks, shards of a model, and files of DeepSpeed's universal checkpoint.
/// `name`: a path relative to the checkpoint's folder. Returns false for an index.
bool may_be_whole_without_index(const std::string& name);

/// Whether Tessera writes files of that name for a format whose files cannot be read without their
/// index. A folder of such files without an index is no checkpoint.
bool needs_index(const std::string& name);

}  // namespace tessera::formats
