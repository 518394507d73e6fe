// Writes a checkpoint and lists it: what a program does that uses Tessera as a library.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/native.h"

int main() {
  using namespace tessera;
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("tessera_consumer_" + std::to_string(std::rand()));
  std::filesystem::remove_all(path);

  formats::CheckpointContents contents;
  formats::TensorEntry entry;
  entry.meta = {"w", DType::float32, {3, 4}};
  entry.pieces = {{whole_box(entry.meta.shape), 0}};
  contents.tensors.push_back(entry);
  const auto writer = formats::create_native(FileSystem::posix(), path.string(), contents, {});
  const std::array<float, 12> weights{1, 2, 3};
  writer->write_block({0, 0}, 0, std::as_bytes(std::span(weights)));
  writer->commit();

  const auto reader = formats::open_checkpoint(FileSystem::posix(), path.string());
  for (const formats::TensorEntry& tensor : reader->contents().tensors) {
    std::printf("%s  %s  %s\n", tensor.meta.fqn.c_str(), dtype_name(tensor.meta.dtype).data(),
                shape_to_string(tensor.meta.shape).c_str());
  }
  std::filesystem::remove_all(path);
}
