#pragma once

#include <memory>
#include <utility>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// The contents that a writer writes. This object owns them, or refers to those of a plan (`of`),
/// because a copy of all entries would take most of the memory of a move of many small tensors.
///
/// Copies of this object share the contents until `edit` is called on one of them. Different
/// threads may use different objects (also copies) at the same time.
class SharedContents {
 public:
  SharedContents() : SharedContents(CheckpointContents()) {}
  SharedContents(CheckpointContents contents)
      : own_(std::make_shared<CheckpointContents>(std::move(contents))), contents_(own_.get()) {}

  /// Returns an object that refers to `contents` and does not own them. `contents` must outlive the
  /// object and its copies, and must not change.
  static SharedContents of(const CheckpointContents& contents) { return {nullptr, &contents}; }

  const CheckpointContents& operator*() const { return *contents_; }
  const CheckpointContents* operator->() const { return contents_; }
  operator const CheckpointContents&() const { return *contents_; }

  /// Returns the contents, to be changed. Copies them first if this object is not their only owner.
  CheckpointContents& edit() {
    if (own_.use_count() != 1) {
      own_ = std::make_shared<CheckpointContents>(*contents_);
      contents_ = own_.get();
    } else {
      // Another thread may just have destroyed the last other copy. Reading the count does not wait
      // for what that thread read before; counting up and down does.
      const std::shared_ptr<CheckpointContents> counted = own_;
    }
    return *own_;
  }

 private:
  SharedContents(std::shared_ptr<CheckpointContents> own, const CheckpointContents* contents)
      : own_(std::move(own)), contents_(contents) {}

  std::shared_ptr<CheckpointContents> own_;  // null: made by `of`, which owns nothing
  const CheckpointContents* contents_;
};

}  // namespace tessera::formats
