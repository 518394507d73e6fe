#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/merged_sources.h"
#include "formats/part_of_check.h"
#include "formats/partly_read.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Base class of readers that show the entries of another reader under other names or in another
/// form. Has the format, path and files of the other reader. A derived class fills `contents_`.
class DerivedReader : public DividedReader, public PartlyRead, public MergedSources {
 public:
  Format format() const override { return base_->format(); }
  const std::string& path() const override { return base_->path(); }
  const CheckpointContents& contents() const final { return contents_; }
  std::vector<std::string> data_files() const override { return base_->data_files(); }
  void check_files(const FindingSink& sink) const override { base_->check_files(sink); }
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    formats::verify_part(*base_, sink, progress, num_threads, part);
  }
  void check_rest(const RestOptions& options) const final { formats::check_rest(*base_, options); }
  std::span<const MergeSource> merged_sources() const final { return sources_of_merge(*base_); }

 protected:
  explicit DerivedReader(std::unique_ptr<CheckpointReader> base) : base_(std::move(base)) {}
  const CheckpointReader& base() const { return *base_; }

  CheckpointContents contents_;

 private:
  std::unique_ptr<CheckpointReader> base_;
};

}  // namespace tessera::formats
