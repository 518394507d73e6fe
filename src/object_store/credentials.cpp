#include "object_store/credentials.h"

#include <algorithm>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kMaxProfileFileNbytes = std::uint64_t{4} << 20;

std::string_view without_blanks(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r";
  const std::size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

/// Returns a setting's value, without_blanks, without a comment (from ` #` or ` ;` on).
std::string_view without_comment(std::string_view value) {
  for (const std::string_view mark : {" #", " ;", "\t#", "\t;"}) {
    value = value.substr(0, value.find(mark));
  }
  return without_blanks(value);
}

ProfileFile read_profile_file(const std::string& path) {
  const FileSystem& fs = FileSystem::posix();
  if (path.empty() || fs.kind_of(path) != FileKind::regular) return {};
  return parse_profile_file(read_file(fs, path, kMaxProfileFileNbytes));
}

std::string path_of(const Environment& environment, const std::string& variable,
                    const std::string& name) {
  if (auto path = environment(variable)) return *path;
  const auto home = environment("HOME");
  return home ? *home + "/.aws/" + name : "";
}

/// The settings of one profile, from both files. If both have a setting, the one in the credentials
/// file is used.
struct Profile {
  std::string name;
  std::string variable{};  // that names it; empty: the default profile
  std::map<std::string, std::string> settings{};
  bool is_found = false;

  bool is_named_by_user() const { return !variable.empty(); }
  std::string get(const std::string& key) const {
    const auto found = settings.find(key);
    return found == settings.end() ? "" : found->second;
  }
};

Profile read_profile(const Environment& environment) {
  Profile profile{.name = "default"};
  // boto3 takes AWS_DEFAULT_PROFILE if both are set.
  for (const char* const variable : {"AWS_PROFILE", "AWS_DEFAULT_PROFILE"}) {
    const auto name = environment(variable);
    if (name) profile = {.name = *name, .variable = variable};
  }
  const std::string credentials_path =
      path_of(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials");
  const std::string config_path = path_of(environment, "AWS_CONFIG_FILE", "config");
  const auto add = [&](const ProfileFile& file, const std::string& section) {
    const auto found = file.find(section);
    if (found == file.end()) return;
    profile.is_found = true;
    profile.settings.insert(found->second.begin(), found->second.end());
  };
  add(read_profile_file(credentials_path), profile.name);
  const ProfileFile config = read_profile_file(config_path);
  add(config, "profile " + profile.name);
  add(config, profile.name);
  if (profile.is_named_by_user() && !profile.is_found) {
    throw Error::expected(
        ErrorKind::invalid_argument, {}, profile.variable,
        "a profile in " + printable(credentials_path) + " or " + printable(config_path),
        "'" + printable(profile.name) + "', which is in neither");
  }
  return profile;
}

/// Throws if AWS's own tools would get other keys for this profile than those that it has: they
/// would assume a role or sign in with them.
void refuse_keys_of_other_identity(const Profile& profile) {
  for (const char* const key : {"role_arn", "sso_session", "sso_start_url"}) {
    if (profile.get(key).empty()) continue;
    throw Error::expected(ErrorKind::invalid_argument, {}, "profile",
                          "one with nothing but keys to sign with",
                          "'" + printable(profile.name) + "' with " + key + " beside its keys",
                          "`aws configure export-credentials` prints the keys of such a profile");
  }
}

bool is_true(const std::optional<std::string>& text) {
  return text && *text != "0" && *text != "false" && *text != "False" && *text != "no";
}

void set_credentials(const Environment& environment, const Profile& profile, S3Settings& settings) {
  Credentials keys{.access_key_id = environment("AWS_ACCESS_KEY_ID").value_or(""),
                   .secret_access_key = environment("AWS_SECRET_ACCESS_KEY").value_or(""),
                   .session_token = environment("AWS_SESSION_TOKEN").value_or("")};
  std::string source = "AWS_ACCESS_KEY_ID";
  const bool is_named = profile.is_named_by_user() && keys.access_key_id.empty();
  if ((keys.access_key_id.empty() && keys.secret_access_key.empty()) || is_named) {
    keys = {.access_key_id = profile.get("aws_access_key_id"),
            .secret_access_key = profile.get("aws_secret_access_key"),
            .session_token = profile.get("aws_session_token")};
    if (!keys.access_key_id.empty()) refuse_keys_of_other_identity(profile);
    source = "profile '" + printable(profile.name) + "'";
  }
  if (keys.access_key_id.empty() && keys.secret_access_key.empty()) {
    if (!profile.is_named_by_user()) return;
    throw Error::expected(
        ErrorKind::invalid_argument, {}, profile.variable,
        "a profile with aws_access_key_id and aws_secret_access_key",
        "'" + printable(profile.name) + "' without them",
        "`aws configure export-credentials` prints the keys of a profile that signs "
        "in or assumes a role");
  }
  if (keys.access_key_id.empty() || keys.secret_access_key.empty()) {
    throw Error::expected(
        ErrorKind::invalid_argument, {}, "credentials", "an access key ID and a secret access key",
        keys.secret_access_key.empty() ? "only an access key ID" : "only a secret access key",
        "from " + source);
  }
  settings.credentials = std::move(keys);
  settings.credentials_source = source;
}

}  // namespace

Environment environment_of_process() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  };
}

namespace {

/// Returns the name of a section as `profile NAME`, also for `[profile  "NAME"]`.
std::string section_name(std::string_view text) {
  constexpr std::string_view kProfile = "profile";
  text = without_blanks(text);
  const std::string_view rest = text.substr(std::min(kProfile.size(), text.size()));
  if (!text.starts_with(kProfile) || without_blanks(rest).size() == rest.size()) {
    return std::string(text);
  }
  std::string_view name = without_blanks(rest);
  const bool is_quoted = name.size() > 1 && (name.front() == '"' || name.front() == '\'') &&
                         name.back() == name.front();
  if (is_quoted) name = name.substr(1, name.size() - 2);
  return std::string(kProfile) + " " + std::string(name);
}

}  // namespace

ProfileFile parse_profile_file(std::string_view text) {
  ProfileFile file;
  std::map<std::string, std::string>* section = nullptr;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view whole_line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::string_view line = without_blanks(whole_line);
    if (line.empty() || line.front() == '#' || line.front() == ';') continue;
    if (line.front() == '[') {
      const std::size_t bracket = line.find(']');
      section = bracket == std::string_view::npos
                    ? nullptr
                    : &file[section_name(line.substr(1, bracket - 1))];
      continue;
    }
    const bool is_nested = whole_line.front() == ' ' || whole_line.front() == '\t';
    const std::size_t equals = line.find('=');
    if (section == nullptr || is_nested || equals == std::string_view::npos) continue;
    std::string key(without_blanks(line.substr(0, equals)));
    std::ranges::transform(key, key.begin(), [](unsigned char c) { return std::tolower(c); });
    section->insert_or_assign(key, std::string(without_comment(line.substr(equals + 1))));
  }
  return file;
}

S3Settings read_s3_settings(const Environment& environment) {
  S3Settings settings;
  const Profile profile = read_profile(environment);
  const auto first_of = [&](std::initializer_list<const char*> variables, const std::string& key) {
    for (const char* variable : variables) {
      if (auto value = environment(variable)) return *value;
    }
    return profile.get(key);
  };
  settings.region = first_of({"AWS_REGION", "AWS_DEFAULT_REGION"}, "region");
  settings.endpoint = first_of({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}, "endpoint_url");
  if (!is_true(environment("AWS_NO_SIGN_REQUEST"))) set_credentials(environment, profile, settings);
  return settings;
}

}  // namespace tessera::object_store
