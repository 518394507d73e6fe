#pragma once

#include <string_view>

namespace tessera::formats {

/// A checkpoint format: its name in output and options. The format's driver (format_driver.h) says
/// what the format can do. Default: native.
class Format {
 public:
  static const Format native;       // Tessera's own
  static const Format dcp;          // PyTorch's distributed checkpoint
  static const Format safetensors;  // a file, or a directory of files with an index
  static const Format torch_zip;    // a file of torch.save; name() is `torch`

  constexpr Format() : Format("native") {}
  /// `name` must live as long as the object and its copies; drivers pass a constant.
  explicit constexpr Format(std::string_view name) : name_(name) {}

  constexpr std::string_view name() const { return name_; }  // in output and options
  friend constexpr bool operator==(Format a, Format b) { return a.name_ == b.name_; }

 private:
  std::string_view name_;
};

inline constexpr Format Format::native{"native"};
inline constexpr Format Format::dcp{"dcp"};
inline constexpr Format Format::safetensors{"safetensors"};
inline constexpr Format Format::torch_zip{"torch"};

}  // namespace tessera::formats
