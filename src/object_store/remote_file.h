#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "object_store/announced_reads.h"
#include "object_store/read_ahead.h"
#include "object_store/server.h"
#include "object_store/window.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {

/// One version of an object, open for reading. Thread-safe.
///
/// Small reads are served from windows (ranges in memory), so that several reads share a request.
/// Large reads go directly into the caller's memory; the largest are split into parallel requests.
/// If a job has announced its reads (AnnouncedReads), the bytes that it needs next are fetched in
/// the background, each once; otherwise, if reads follow each other, those behind them.
class RemoteFile final : public ReadableFile {
 public:
  /// Requires: `server` outlives the file. `begin`: the object's first bytes, if known; else empty.
  RemoteFile(Server& server, std::string url, ObjectVersion version, std::vector<std::byte> begin,
             ReadAheadSizes sizes = {});

  const std::string& path() const override { return object_->url; }
  std::uint64_t nbytes() const override { return object_->version.nbytes; }
  std::string version() const override { return object_->version.in_words(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override;

 private:
  /// The data that requests in the background need, even after the file was closed.
  struct Object {
    Server& server;
    std::string url;
    ObjectVersion version;
  };
  using WindowPointer = std::shared_ptr<Window>;

  void read_ahead(ByteRange read) const;
  std::uint64_t take_from(const WindowPointer& window, ByteRange rest,
                          std::span<std::byte> out) const;
  WindowPointer window_with(std::uint64_t offset) const;
  std::uint64_t next_window(std::uint64_t offset) const;
  void forget(const WindowPointer& window) const;
  bool forget_unneeded(ReadList* announced) const;
  void read_small(ByteRange read, std::span<std::byte> out) const;
  void read_parts(ByteRange range, std::span<std::byte> out) const;

  std::shared_ptr<const Object> object_;
  ReadAheadSizes sizes_;
  mutable std::mutex mutex_;
  mutable StreamFinder streams_;
  mutable std::vector<WindowPointer> windows_;
};

}  // namespace tessera::object_store
