#pragma once

#include <memory>
#include <span>
#include <string>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::dcp {

/// An opened item: a torch.save file inside a file of the checkpoint, which may hold other items
/// too. `as_dict`: as for TorchArchive.
struct Item {
  Item(std::shared_ptr<const ReadableFile> in_file, ByteRange window,
       std::span<const std::string> as_dict)
      : file(std::move(in_file)), archive(*file, window, as_dict) {}

  std::shared_ptr<const ReadableFile> file;
  torch_zip::TorchArchive archive;
};

/// A chunk of a tensor. Its item holds only this chunk, or is a value that contains the tensor.
struct Chunk {
  std::shared_ptr<const Item> item;
  torch_zip::TensorRecord record;
};

}  // namespace tessera::formats::dcp
