#include "ckpt-inspect/source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/json.h"
#include "base/size_text.h"
#include "ckpt-inspect/standard_input.h"
#include "cli/command_line_remedies.h"
#include "formats/flat_layout.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/other_formats.h"
#include "formats/per_rank_rules.h"
#include "object_store/files.h"
#include "reshard/plan_report.h"
#include "tessera/base/file_system.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/executor.h"

namespace tessera::cli {

void add_source_arguments(Command& command, SourceOptions& options) {
  command.argument("PATH", options.path, kPathHelp);
  command.arguments(
      "GLOB...", options.patterns,
      "Only these names and everything below them. =GLOB: only the names themselves. !GLOB: leave "
      "these names out. * also matches dots");
}

void add_flat_layout_option(Command& command, SourceOptions& options) {
  command.option("--flat-layout", "FILE", options.flat_layout_path,
                 "JSON file: the parameters in the flat vectors (FSDP1 LOCAL_STATE_DICT)");
}

void add_as_dict_option(Command& command, std::vector<std::string>& as_dict) {
  command.option("--as-dict", "CLASS", as_dict,
                 "Read objects of this class, such as argparse.Namespace, as dicts. Repeatable");
}

void add_work_options(Command& command, WorkOptions& options) {
  command.size_option("--memory", "SIZE", options.memory_nbytes,
                      "Memory for elements (default: {})");
  add_threads_option(command, options.num_threads);
  add_progress_option(command, options.progress);
}

namespace {

/// Lives until the process ends, as the readers do.
const reshard::SourceFiles& source_files() {
  static const auto& files = *new const reshard::SourceFiles;
  return files;
}

std::unique_ptr<formats::CheckpointReader> open_reader(const SourceOptions& options) {
  if (options.path == kStandardInput) {
    static const StandardInput input(STDIN_FILENO);
    auto reader = formats::open_checkpoint(input, options.path, {.as_dict = options.as_dict});
    if (options.flat_layout_path.empty()) return reader;
    return formats::apply_flat_layout(
        std::move(reader),
        formats::read_flat_layout(FileSystem::posix(), options.flat_layout_path));
  }
  return formats::open_checkpoint(
      source_files().file_system(), options.path,
      {.flat_layout_path = options.flat_layout_path, .as_dict = options.as_dict});
}

const formats::CheckpointReader* open_kept(const SourceOptions& options) {
  // Readers are never destroyed, because the process ends with its command, and freeing a large
  // index would take a quarter of the time of listing it.
  static auto& kept = *new std::vector<std::unique_ptr<formats::CheckpointReader>>;
  auto reader = open_reader(options);
  const auto recipe = read_recipe(options.recipe, {options.path});
  return kept.emplace_back(apply_recipe(std::move(reader), recipe)).get();
}

void print_notes(const formats::CheckpointReader& reader, Terminal& terminal) {
  for (const std::string& file : reader.contents().missing_files) {
    terminal.print_error("note: " +
                         finding_line({.severity = formats::Finding::Severity::note,
                                       .rule = "structure",
                                       .where = {.path = file},
                                       .expected = "the file that " + printable(reader.path()) +
                                                   " lists, with its values",
                                       .found = "none"}));
  }
  if (reader.path() != kStandardInput) {
    const auto others = formats::note_of_other_formats(object_store::files(), reader);
    if (others) terminal.print_error("note: " + finding_line(*others));
  }
  if (reader.contents().part) {
    terminal.print_error("note: " + printable(reader.path()) + ": " +
                         part_in_words(*reader.contents().part));
  }
  for (formats::Finding finding : reader.contents().opening_findings) {
    finding.severity = formats::Finding::Severity::note;
    terminal.print_error("note: " + finding_line(finding));
  }
  for (const formats::OpenedClass& objects : reader.contents().opened_classes) {
    terminal.print_error("note: " + printable(reader.path()) + ": " +
                         opened_class_in_words(objects));
  }
}

std::vector<std::string_view> names_in(const formats::CheckpointContents& contents) {
  std::vector<std::string_view> names;
  for (const auto& tensor : contents.tensors) names.push_back(tensor.meta.fqn);
  for (const auto& value : contents.values) names.push_back(value.name);
  for (const auto& alias : contents.aliases) names.push_back(alias.fqn);
  return names;
}

/// Notes patterns `!GLOB` that match none of `names`, the names of entries.
void print_unused_exclusions(const NameSelection& selection,
                             const std::vector<std::string_view>& names, Terminal& terminal) {
  for (const std::string& pattern : formats::unused_patterns(selection, names).exclusions) {
    terminal.print_error("note: " +
                         finding_line(reshard::note_of_unused_exclusion({}, "names", pattern)));
  }
}

}  // namespace

const FileSystem& source_file_system() {
  return source_files().file_system();
}

void require_sources_unchanged() {
  source_files().require_unchanged();
}

const formats::CheckpointReader* open_source(const SourceOptions& options) {
  const auto* const reader = open_kept(options);
  formats::require_classes_found(options.as_dict, {&reader->contents()}, "--as-dict");
  return reader;
}

const formats::CheckpointReader* open_source(const SourceOptions& options, Terminal& terminal) {
  const auto* const reader = open_source(options);
  print_notes(*reader, terminal);
  print_unused_exclusions(NameSelection(options.patterns), names_in(reader->contents()), terminal);
  return reader;
}

TwoSources open_two_sources(const SourceOptions& a, const SourceOptions& b, Terminal& terminal) {
  const TwoSources sources{open_kept(a), open_kept(b)};
  formats::require_classes_found(a.as_dict, {&sources.a->contents(), &sources.b->contents()},
                                 "--as-dict");
  print_notes(*sources.a, terminal);
  print_notes(*sources.b, terminal);
  return sources;
}

void write_source(JsonOutput& json, std::string_view format,
                  const formats::CheckpointContents& contents) {
  json.member("format", format);
  if (contents.part) json.member("part", part_in_words(*contents.part));
  if (contents.missing_files.empty()) return;
  json.key("missing_files").begin_array();
  for (const std::string& file : contents.missing_files) json.value(file);
  json.end_array();
}

inspect::Selection select_names(const formats::CheckpointReader& reader,
                                const SourceOptions& options) {
  return inspect::select(reader.contents(), NameSelection(options.patterns), reader.path());
}

inspect::Selection select_with_tensors_of_aliases(const formats::CheckpointReader& reader,
                                                  const SourceOptions& options) {
  inspect::Selection selection = select_names(reader, options);
  inspect::add_tensors_of_aliases(reader.contents(), selection);
  return selection;
}

void require_patterns_used(const NameSelection& names, const formats::CheckpointReader& a,
                           const formats::CheckpointReader& b, const std::vector<Rename>& renames,
                           Terminal& terminal) {
  std::vector<std::string> all;
  for (const formats::CheckpointReader* reader : {&a, &b}) {
    for (const std::string_view name : names_in(reader->contents())) {
      all.push_back(reader == &a ? formats::name_after_renames(std::string(name), renames)
                                 : std::string(name));
    }
  }
  const std::vector<std::string_view> views(all.begin(), all.end());
  const std::vector<std::string> unused = formats::unused_patterns(names, views).wanted;
  if (!unused.empty()) {
    throw Error(ErrorKind::invalid_argument, {},
                "no name in A or B matches '" + printable(unused.front()) + "'");
  }
  print_unused_exclusions(names, views, terminal);
  const formats::EntrySelection selection(names);
  const auto is_selected = [&](const std::string& name) { return selection.selects(name); };
  if (names.selects_everything() || std::ranges::any_of(all, is_selected)) return;
  throw Error(ErrorKind::invalid_argument, {},
              "the patterns together select no names in A or B (does a !pattern remove them all?)");
}

std::vector<std::string> ExtraFiles::names() const {
  std::vector<std::string> all;
  for (const formats::ExtraEntry& file : files) all.push_back(file.name);
  return all;
}

std::string ExtraFiles::in_words() const {
  if (files.empty()) return {};
  std::uint64_t nbytes = 0;
  for (const formats::ExtraEntry& file : files) nbytes += file.nbytes;
  return "; " + counted(files.size(), "extra file") + ", " + exact_size(nbytes);
}

void ExtraFiles::write(JsonOutput& json) const {
  if (files.empty()) return;
  json.key("extra_files").begin_array();
  for (const formats::ExtraEntry& file : files) {
    json.begin_object().member("name", file.name).member("nbytes", file.nbytes).end_object();
  }
  json.end_array();
}

ExtraFiles find_extra_files(const formats::CheckpointReader& reader, const SourceOptions& options) {
  using Kind = formats::ExtraEntry::Kind;
  const FileSystem& fs = object_store::files();
  if (options.path == kStandardInput || fs.kind_of(options.path) != FileKind::directory) return {};
  const std::vector<std::string> data_files = reader.data_files();
  ExtraFiles found{formats::list_extra_entries(fs, options.path, reader.format(),
                                               {data_files.begin(), data_files.end()})};
  std::erase_if(found.files, [](const formats::ExtraEntry& entry) {
    return entry.kind != Kind::file && entry.kind != Kind::checkpoint_file &&
           entry.kind != Kind::unnamed_file;
  });
  return found;
}

Work::Work(Terminal& terminal, std::string phase, std::uint64_t total_nbytes,
           const WorkOptions& options)
    : progress_(terminal, options.progress, std::move(phase), total_nbytes), options_(options) {}

inspect::ScanOptions Work::scan_options() {
  return {.num_threads = checked_num_threads(options_.num_threads, "ckpt-inspect --help"),
          .memory_nbytes = options_.memory_nbytes,
          .stop = signals_.token(),
          .progress = [this](std::uint64_t nbytes) { progress_.add(nbytes); }};
}

std::string format_in_words(const formats::CheckpointReader& reader) {
  std::string text(reader.format().name());
  const bool has_ranks = formats::traits_of(reader.format()).has_ranks_when_read ||
                         !formats::holds_whole_tensors(reader.format());
  if (has_ranks) {
    text += ", " + counted(static_cast<std::uint64_t>(reader.contents().world_size), "rank");
  }
  if (!formats::holds_whole_tensors(reader.format()) &&
      formats::megatron::is_torch_dist(object_store::files(), reader.path())) {
    text += " (Megatron's torch_dist)";
  }
  if (const std::uint64_t nbytes = shared_nbytes(reader); nbytes > 0) {
    text += "; " + exact_size(nbytes) + " of its files shared with other checkpoints";
  }
  return text;
}

std::uint64_t shared_nbytes(const formats::CheckpointReader& reader) {
  std::uint64_t nbytes = 0;
  if (!formats::traits_of(reader.format()).has_base) return nbytes;
  for (const std::string& path : reader.data_files()) {
    struct stat status {};
    const bool is_shared = ::stat(path.c_str(), &status) == 0 && status.st_nlink > 1;
    if (is_shared) nbytes += static_cast<std::uint64_t>(status.st_size);
  }
  return nbytes;
}

void write_shared_nbytes(JsonOutput& json, const formats::CheckpointReader& reader) {
  if (const std::uint64_t nbytes = shared_nbytes(reader)) json.member("shared_nbytes", nbytes);
}

namespace {

/// Returns the word for a value that could not be read because of `error`: `refused` if Tessera
/// never reads this kind of value, `unreadable` if the value is missing or damaged. Throws all
/// other errors, such as Error(io), again.
std::string word_for_unread(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::unsupported:
      return "refused";
    case ErrorKind::corruption:
    case ErrorKind::not_found:
      return "unreadable";
    default:
      throw error;
  }
}

std::string reason_of(const Error& error) {
  if (error.kind() == ErrorKind::unsupported) return std::string(error.reason());
  const std::string file = printable(last_component(error.where().path));
  return (file.empty() ? "" : file + ": ") + std::string(error.reason());
}

}  // namespace

ValueWords value_in_words(const formats::CheckpointReader& reader, std::size_t value_index) {
  try {
    const Value value = reader.read_value(value_index);
    return {std::string(type_name(value)), value_to_string(value)};
  } catch (const Error& error) {
    return {word_for_unread(error), reason_of(error)};
  }
}

std::string value_as_json(const formats::CheckpointReader& reader, std::size_t value_index) {
  try {
    return value_to_json(reader.read_value(value_index));
  } catch (const Error& error) {
    return "{\"$" + word_for_unread(error) + "\":" + json_quote(reason_of(error)) + "}";
  }
}

std::string counts_in_words(const inspect::Totals& totals) {
  std::string text = counted(static_cast<std::uint64_t>(totals.num_tensors), "tensor");
  if (totals.num_aliases > 0) {
    text += ", " + counted(static_cast<std::uint64_t>(totals.num_aliases), "alias", "aliases");
  }
  if (totals.num_values > 0) {
    text += ", " + counted(static_cast<std::uint64_t>(totals.num_values), "value");
  }
  return text;
}

}  // namespace tessera::cli
