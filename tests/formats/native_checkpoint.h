#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/files.h"
#include "support/memory_checkpoint.h"
#include "support/random.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/native.h"

namespace tessera::test {

/// Returns bytes that compress as weights do: the last byte of each element has one of four values.
inline Bytes weight_like_bytes(std::uint64_t nbytes, std::uint64_t itemsize, Random& random) {
  const std::string noise = random.bytes(nbytes);
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) {
    const auto byte = static_cast<unsigned char>(noise[i]);
    const bool is_last = i % itemsize == itemsize - 1;
    bytes[i] = std::byte(is_last ? 0x38 + byte % 4 : byte);
  }
  return bytes;
}

inline Bytes random_bytes(std::uint64_t nbytes, Random& random) {
  const std::string noise = random.bytes(nbytes);
  const auto raw = std::as_bytes(std::span(noise));
  return {raw.begin(), raw.end()};
}

/// Returns the options for zstd with small chunks.
inline formats::NativeWriteOptions zstd_options() {
  formats::NativeWriteOptions options;
  options.compression = formats::NativeWriteOptions::Compression::zstd;
  options.chunk_nbytes = 65536;
  return options;
}

/// Writes all tensors of `source` with `writer`, block by block on `num_threads` threads. Commits.
inline void write_all(const formats::CheckpointReader& source, formats::CheckpointWriter& writer,
                      int num_threads = 1) {
  struct Block {
    formats::CheckpointWriter::PieceId piece;
    FlatRange range;
  };
  std::vector<Block> blocks;
  for (const auto& piece : writer.write_order()) {
    const auto& tensor = writer.contents().tensors[piece.tensor_index];
    const std::int64_t numel = numel_of(tensor.pieces[piece.piece_index].region);
    const std::int64_t block_numel = writer.block_numel(piece);
    for (std::int64_t begin = 0; begin < numel; begin += block_numel) {
      blocks.push_back({piece, {begin, std::min(begin + block_numel, numel)}});
    }
  }
  try {
    parallel_for(static_cast<std::int64_t>(blocks.size()), num_threads, {}, [&](std::int64_t i) {
      const Block& block = blocks[static_cast<std::size_t>(i)];
      const DType dtype = writer.contents().tensors[block.piece.tensor_index].meta.dtype;
      Bytes bytes(static_cast<std::size_t>(block.range.numel()) * itemsize(dtype));
      source.read_piece(block.piece.tensor_index, block.piece.piece_index, block.range, bytes);
      writer.write_block(block.piece, block.range.begin, bytes);
    });
  } catch (...) {
    writer.abandon();
    throw;
  }
  writer.commit();
}

inline void write_native(const formats::CheckpointReader& source, const std::string& path,
                         const formats::NativeWriteOptions& options = {}, int num_threads = 1,
                         OverwritePolicy overwrite = OverwritePolicy::refuse) {
  std::vector<Value> values;
  for (std::size_t v = 0; v < source.contents().values.size(); ++v) {
    values.push_back(source.read_value(v));
  }
  const auto writer = formats::create_native(FileSystem::posix(), path, source.contents(),
                                             std::move(values), overwrite, options);
  write_all(source, *writer, num_threads);
}

/// A checkpoint of a few hundred bytes that has one of everything that the format can store.
inline MemoryCheckpoint small_checkpoint() {
  MemoryCheckpoint checkpoint("small", 3);
  auto& weight = checkpoint.add({"layers.0.weight", DType::float32, {4, 6}},
                                bytes_of<float>({0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                                 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}),
                                {{Box{{0, 0}, {2, 6}}, 0}, {Box{{2, 0}, {2, 6}}, 1}});
  weight.key_path = {std::string("layers"), std::int64_t{0}, std::string("weight")};
  auto& state = checkpoint.add(
      {"optim.state.layers.0.weight.exp_avg", DType::bfloat16, {3, 5}},
      bytes_of<std::uint16_t>({0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100,
                               0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x7FC1, 0xFF80}),
      {{FlatRange{0, 7}, 0}, {FlatRange{7, 15}, 1}, {FlatRange{15, 15}, 2}});
  state.kind = formats::StateKind::pointwise;
  state.parameter = "layers.0.weight";
  checkpoint.add({"step", DType::float32, {}}, bytes_of<float>({3}), {{Box{}, 1}, {Box{}, 0}});
  checkpoint.add({"empty", DType::int64, {0, 7}}, {});
  checkpoint.add({"ids", DType::int64, {3}}, bytes_of<std::int64_t>({1, -1, 1 << 20}),
                 {{Box{{0}, {3}}, 1}});
  checkpoint.add_value("epoch", Value(7));
  checkpoint.add_value("groups.0", Value(1)).key_path = {"groups", *formats::dict_key(0)};
  checkpoint.add_value("betas", Value(Value::Tuple{{Value(0.9), Value(0.999)}}));
  checkpoint.add_alias("tied.weight", "layers.0.weight");
  checkpoint.contents_for_change().annotations["made_by"] = "a test";
  checkpoint.contents_for_change().units = {
      make_flat_unit("layers", DType::float32, {{"layers.0.weight", {4, 6}}})};
  return checkpoint;
}

/// Returns the version of the stored format in a file's header.
inline std::uint32_t version_of(const std::string& path) {
  return static_cast<unsigned char>(read_all(path)[8]);
}

/// Returns the names of the linked files in a checkpoint.
inline std::vector<std::string> linked_files(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files_of(path)) {
    if (name.starts_with("base-")) names.push_back(name);
  }
  return names;
}

inline std::shared_ptr<const formats::BaseCheckpoint> open_base_at(const std::string& path) {
  return formats::BaseCheckpoint::open(FileSystem::posix(), path, formats::Format::native);
}

/// Returns what `verify` finds in the native checkpoint at `path`.
inline std::vector<formats::Finding> findings_of(const std::string& path) {
  std::vector<formats::Finding> findings;
  formats::open_native(FileSystem::posix(), path)
      ->verify([&](const formats::Finding& finding) { findings.push_back(finding); }, {}, 1);
  return findings;
}

/// Expects a sound checkpoint at `path` with the tensors of `source`.
inline void expect_holds(const std::string& path, const formats::CheckpointReader& source) {
  EXPECT_TRUE(findings_of(path).empty());
  const auto reader = formats::open_native(FileSystem::posix(), path);
  for (std::size_t t = 0; t < source.contents().tensors.size(); ++t) {
    ASSERT_EQ(reader->contents().tensors[t].meta, source.contents().tensors[t].meta);
    EXPECT_EQ(whole_tensor(*reader, t), whole_tensor(source, t))
        << source.contents().tensors[t].meta.fqn;
  }
}

}  // namespace tessera::test
