#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "formats/staging/staged_work.h"
#include "formats/stored_chunks.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {

/// Wraps the writer of a format, which writes into a staging directory. `commit` makes the files of
/// that writer appear at the destination.
class StagedWriter final : public ShareWriter, public ChunkSink {
 public:
  StagedWriter(std::unique_ptr<StagedWork> staged, std::unique_ptr<ShareWriter> writer)
      : staged_(std::move(staged)),
        writer_(std::move(writer)),
        chunk_sink_(dynamic_cast<ChunkSink*>(writer_.get())) {}

  const CheckpointContents& contents() const override { return writer_->contents(); }
  std::span<const PieceId> write_order() const override { return writer_->write_order(); }
  std::int64_t block_numel(PieceId piece) const override { return writer_->block_numel(piece); }
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    writer_->write_block(piece, begin, bytes);
  }
  bool takes_chunks(PieceId piece) const override {
    return chunk_sink_ != nullptr && chunk_sink_->takes_chunks(piece);
  }
  bool write_chunk(PieceId piece, std::int64_t begin, const StoredChunk& chunk) override {
    return chunk_sink_ != nullptr && chunk_sink_->write_chunk(piece, begin, chunk);
  }
  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    return writer_->resume_block(piece, begin, room);
  }
  bool is_resumed() const override { return staged_->is_resumed(); }
  bool keep_work() noexcept override { return staged_->keep(); }
  void abandon() noexcept override { writer_->abandon(); }
  void commit() override {
    writer_->commit();
    staged_->commit();
  }
  Unit unit() const override { return writer_->unit(); }
  std::size_t file_of(PieceId piece) const override { return writer_->file_of(piece); }
  void adopt_block(PieceId piece, std::int64_t begin) override {
    writer_->adopt_block(piece, begin);
  }
  void commit_share() override {
    writer_->commit_share();
    staged_->commit_share();
  }

 private:
  std::unique_ptr<StagedWork> staged_;  // outlives the writer of the files
  std::unique_ptr<ShareWriter> writer_;
  ChunkSink* const chunk_sink_;  // the writer, if it takes chunks; else null
};

}  // namespace tessera::formats
