#include "tessera/formats/format_driver.h"

#include <algorithm>
#include <iterator>

#include "base/word_list.h"
#include "formats/drivers.h"

namespace tessera::formats {
namespace {

std::vector<const FormatDriver*>& registered_drivers() {
  static std::vector<const FormatDriver*> drivers = built_in_drivers();
  return drivers;
}

const FormatDriver* find_driver(std::string_view name) {
  const auto& drivers = registered_drivers();
  const auto found = std::ranges::find_if(
      drivers, [&](const FormatDriver* driver) { return driver->format().name() == name; });
  return found == drivers.end() ? nullptr : *found;
}

}  // namespace

bool DirectoryListing::has(std::string_view name) const {
  return std::ranges::find(names, name) != names.end();
}

std::vector<std::string> FormatDriver::own_files(const FileSystem& /*fs*/,
                                                 const std::string& /*directory*/,
                                                 const std::vector<std::string>& names,
                                                 const std::set<std::string>& /*opened*/) const {
  std::vector<std::string> own;
  std::ranges::copy_if(names, std::back_inserter(own),
                       [&](const std::string& name) { return may_own_file(name); });
  return own;
}

const std::vector<const FormatDriver*>& format_drivers() {
  return registered_drivers();
}

void register_format(const FormatDriver& driver) {
  if (find_driver(driver.format().name()) != nullptr) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "name of a format",
                          "a name that no other format has", driver.format().name());
  }
  registered_drivers().push_back(&driver);
}

const FormatDriver& driver_of(Format format) {
  if (const FormatDriver* driver = find_driver(format.name())) return *driver;
  throw Error::expected(ErrorKind::unsupported, {}, "format", "a registered format",
                        format.name());
}

FormatTraits traits_of(Format format) {
  return driver_of(format).traits();
}

bool holds_whole_tensors(Format format) {
  return traits_of(format).pieces == FormatTraits::Pieces::whole_tensors;
}

std::optional<Format> parse_format(std::string_view name) {
  const FormatDriver* driver = find_driver(name);
  return driver == nullptr ? std::nullopt : std::optional(driver->format());
}

std::vector<std::string> writable_format_names() {
  std::vector<std::string> names;
  for (const FormatDriver* driver : registered_drivers()) {
    if (driver->traits().can_be_written) names.emplace_back(driver->format().name());
  }
  return names;
}

std::string writable_formats_in_words(bool (*suits)(const FormatTraits&)) {
  std::vector<std::string_view> names;
  for (const FormatDriver* driver : registered_drivers()) {
    const FormatTraits traits = driver->traits();
    if (traits.can_be_written && (suits == nullptr || suits(traits))) {
      names.push_back(driver->format().name());
    }
  }
  return tessera::detail::choice_of(names);
}

Format format_for_destination(const std::string& path) {
  for (const FormatDriver* driver : registered_drivers()) {
    if (!driver->traits().can_be_written) continue;
    for (const std::string_view suffix : driver->file_suffixes()) {
      if (path.ends_with(suffix)) return driver->format();
    }
  }
  return Format();
}

}  // namespace tessera::formats
