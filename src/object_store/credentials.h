#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "object_store/sigv4.h"

namespace tessera::object_store {

/// Returns the value of an environment variable; nothing if it is not set or empty.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment environment_of_process();

/// The sections of an ini file such as `~/.aws/credentials`, each with its keys.
using ProfileFile = std::map<std::string, std::map<std::string, std::string>>;

/// Parses an ini file. Ignores nested settings (indented lines), settings before the first section,
/// and lines that are neither a section nor a setting.
ProfileFile parse_profile_file(std::string_view text);

/// How to reach S3: the settings in the user's environment variables and in AWS's two files.
struct S3Settings {
  std::optional<Credentials> credentials{};  // none: requests are not signed
  std::string credentials_source{};          // for messages: `AWS_ACCESS_KEY_ID`, `profile 'p'`
  std::string region{};                      // empty: not set
  std::string endpoint{};                    // empty: AWS
};

/// Reads the environment variables of AWS (AWS_ACCESS_KEY_ID, …) and the profile
/// AWS_DEFAULT_PROFILE (or AWS_PROFILE) in AWS_SHARED_CREDENTIALS_FILE (`~/.aws/credentials`) and
/// AWS_CONFIG_FILE (`~/.aws/config`). Variables take precedence over files. Throws:
/// Error(invalid_argument) if the named profile does not exist or lacks needed keys, if its keys
/// are to be used to assume a role or beside a sign-in, or if only one of key ID and secret is set.
S3Settings read_s3_settings(const Environment& environment);

}  // namespace tessera::object_store
