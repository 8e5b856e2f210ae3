//! Reads a device as the command line gives it: `path=FILE,readonly,id=NAME`.

use std::fmt;
use std::str::FromStr;

use super::error::ConfigError;

/// The reason why the text that describes a device is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpecError {
    /// The device has no such option.
    #[error("\"{option}\" is not an option of {device}: they are {}", SentenceList(options))]
    Unknown {
        /// The option, as it was given.
        option: String,
        /// The device.
        device: &'static str,
        /// The options that it has.
        options: &'static [&'static str],
    },
    /// The option needs a value.
    #[error("\"{option}\" has no value: it is {form}")]
    NoValue {
        /// The option, as it was given.
        option: String,
        /// Its syntax.
        form: &'static str,
    },
    /// The option takes no value.
    #[error("\"{option}\" has a value, and takes none: it is {form}")]
    ValueOfFlag {
        /// The option, as it was given.
        option: String,
        /// Its syntax.
        form: &'static str,
    },
    /// The option is given more than once.
    #[error("\"{option}\" is the second {key} of {device}: give it once")]
    Twice {
        /// The option, as it was given the second time.
        option: String,
        /// Its name.
        key: &'static str,
        /// The device.
        device: &'static str,
    },
    /// An option that the device needs is missing.
    #[error("\"{text}\" lacks {form}, which {device} needs")]
    Missing {
        /// The device, as it was given.
        text: String,
        /// The option's syntax.
        form: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The option's value should be a number in its range.
    #[error("{key}={value}: the value must be a whole number, {range}")]
    Number {
        /// The option's name.
        key: String,
        /// Its value.
        value: String,
        /// The numbers that it can be, such as `1 to 8`.
        range: String,
    },
    /// The option's value should be `on` or `off`.
    #[error("\"{key}={value}\" is neither on nor off")]
    OnOff {
        /// The option's name.
        key: String,
        /// Its value.
        value: String,
    },
    /// A path was given where an option belongs.
    #[error("a disk needs path=FILE: --disk path={path}")]
    DiskPath {
        /// The path.
        path: String,
    },
    /// The option's value is not one that it can have.
    #[error(transparent)]
    Value(#[from] ConfigError),
}

/// Formats a list as in a sentence.
struct SentenceList<'a>(&'a [&'static str]);

impl fmt::Display for SentenceList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(items) = self;
        match items.split_last() {
            None => Ok(()),
            Some((last, [])) => f.write_str(last),
            Some((last, rest)) => write!(f, "{} and {last}", rest.join(", ")),
        }
    }
}

/// The options that a device has on the command line.
pub(super) struct Syntax {
    /// The device, with its article.
    pub(super) device: &'static str,
    /// The syntax of each option: `key=VALUE` or, for a flag, `key`. A remark may follow after a
    /// space.
    pub(super) options: &'static [&'static str],
}

/// The options that are given for one device, each at most once.
pub(super) struct GivenOptions<'t> {
    syntax: &'static Syntax,
    text: &'t str,
    given: Vec<(&'static str, &'t str)>,
}

impl Syntax {
    /// Splits `text` into its options.
    pub(super) fn read<'t>(&'static self, text: &'t str) -> Result<GivenOptions<'t>, SpecError> {
        let mut given: Vec<(&str, &str)> = Vec::new();
        for option in text.split(',').filter(|_| !text.is_empty()) {
            let (key, value) = match option.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (option, None),
            };
            let form = self.form(key).ok_or_else(|| SpecError::Unknown {
                option: option.to_owned(),
                device: self.device,
                options: self.options,
            })?;
            let option = || option.to_owned();
            match value {
                None | Some("") if takes_value(form) => {
                    return Err(SpecError::NoValue { option: option(), form });
                }
                Some(_) if !takes_value(form) => {
                    return Err(SpecError::ValueOfFlag { option: option(), form });
                }
                _ => {}
            }
            let key = key_of(form);
            if given.iter().any(|(other, _)| *other == key) {
                return Err(SpecError::Twice { option: option(), key, device: self.device });
            }
            given.push((key, value.unwrap_or_default()));
        }
        Ok(GivenOptions { syntax: self, text, given })
    }

    fn form(&self, key: &str) -> Option<&'static str> {
        self.options.iter().copied().find(|form| key_of(form) == key)
    }
}

fn key_of(form: &'static str) -> &'static str {
    form.split(['=', ' ']).next().unwrap_or(form)
}

fn takes_value(form: &str) -> bool {
    form.split(' ').next().is_some_and(|option| option.contains('='))
}

impl<'t> GivenOptions<'t> {
    /// Returns the option's value, which is not empty; of a flag, an empty text.
    pub(super) fn get(&self, key: &str) -> Option<&'t str> {
        self.given.iter().find(|(given, _)| *given == key).map(|(_, value)| *value)
    }

    /// Returns whether the option is given.
    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Returns the option's value, or an error if it is not given.
    pub(super) fn require(&self, key: &str) -> Result<&'t str, SpecError> {
        self.get(key).ok_or_else(|| SpecError::Missing {
            text: self.text.to_owned(),
            form: self.syntax.form(key).unwrap_or_default(),
            device: self.syntax.device,
        })
    }

    /// Returns the option's value as a number, if it is given. `range` describes the numbers that
    /// it can be, in errors.
    pub(super) fn number<T: FromStr>(
        &self,
        key: &str,
        range: &str,
    ) -> Result<Option<T>, SpecError> {
        let read = |value: &str| {
            value.parse().map_err(|_| SpecError::Number {
                key: key.to_owned(),
                value: value.to_owned(),
                range: range.to_owned(),
            })
        };
        self.get(key).map(read).transpose()
    }

    /// Returns whether the option is `on`, or `default` if it is not given.
    pub(super) fn on_off(&self, key: &str, default: bool) -> Result<bool, SpecError> {
        match self.get(key) {
            None => Ok(default),
            Some("on") => Ok(true),
            Some("off") => Ok(false),
            Some(value) => Err(SpecError::OnOff { key: key.to_owned(), value: value.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static LAMP: Syntax = Syntax {
        device: "a lamp",
        options: &["watts=N", "colour=NAME", "dimmed (in a hall)", "lit=on|off"],
    };

    #[test]
    fn options_have_the_values_that_are_given() {
        let lamp = LAMP.read("colour=a=b,dimmed,watts=60").unwrap();
        assert_eq!(lamp.get("colour"), Some("a=b"));
        let watts = lamp.number::<u8>("watts", "0 to 255");
        assert_eq!((watts, lamp.has("dimmed")), (Ok(Some(60)), true));
        assert_eq!((lamp.on_off("lit", true), lamp.on_off("lit", false)), (Ok(true), Ok(false)));
        assert_eq!(LAMP.read("lit=off").unwrap().on_off("lit", true), Ok(false));
        let none = LAMP.read("").unwrap();
        assert!(!none.has("colour") && none.number::<u8>("watts", "0 to 255") == Ok(None));
    }

    #[test]
    fn wrong_options_are_refused_by_name() {
        let all = "they are watts=N, colour=NAME, dimmed (in a hall) and lit=on|off";
        let cases = [
            ("volts=3", format!("\"volts=3\" is not an option of a lamp: {all}")),
            ("dimmed,", format!("\"\" is not an option of a lamp: {all}")),
            ("=3", format!("\"=3\" is not an option of a lamp: {all}")),
            ("Watts=3", format!("\"Watts=3\" is not an option of a lamp: {all}")),
            ("watts", "\"watts\" has no value: it is watts=N".to_owned()),
            ("colour=", "\"colour=\" has no value: it is colour=NAME".to_owned()),
            (
                "dimmed=yes",
                "\"dimmed=yes\" has a value, and takes none: it is dimmed (in a hall)".to_owned(),
            ),
            (
                "watts=3,dimmed,watts=4",
                "\"watts=4\" is the second watts of a lamp: give it once".to_owned(),
            ),
            ("dimmed,dimmed", "\"dimmed\" is the second dimmed of a lamp: give it once".to_owned()),
        ];
        for (text, message) in cases {
            assert_eq!(LAMP.read(text).err().unwrap().to_string(), message);
        }
        let lamp = LAMP.read("watts=300,lit=yes").unwrap();
        let missing = lamp.require("colour").unwrap_err().to_string();
        assert_eq!(missing, "\"watts=300,lit=yes\" lacks colour=NAME, which a lamp needs");
        let number = lamp.number::<u8>("watts", "0 to 255").unwrap_err().to_string();
        assert_eq!(number, "watts=300: the value must be a whole number, 0 to 255");
        let lit = lamp.on_off("lit", true).unwrap_err().to_string();
        assert_eq!(lit, "\"lit=yes\" is neither on nor off");
    }
}
