//! The file that a store is saved in: named arrays in one container that other programs open.
//!
//! The form is that of [safetensors](https://github.com/huggingface/safetensors): eight bytes with the length of a header, a
//! header in JSON that names each array with its element type, shape and place, then the arrays, little-endian, one behind
//! the other. What it does not do: know what the arrays mean (see `saving` and `loading`).

use crate::element::DType;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// No header is longer.
const MOST_HEADER: u64 = 100 << 20;

/// One array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// Bytes from the first behind the header.
    pub(super) begin: u64,
    pub(super) end: u64,
}

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) arrays: Vec<Array>,
    pub(super) metadata: Vec<(String, String)>,
    /// Where the arrays begin in the file.
    pub(super) data: u64,
}

/// The name of an element type in the header.
pub(super) fn dtype_name(dtype: DType) -> String {
    dtype.name().to_uppercase()
}

/// Bytes of an element of that name.
fn dtype_size(name: &str) -> Option<u64> {
    match name {
        "BOOL" | "U8" | "I8" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" => Some(8),
        _ => None,
    }
}

impl Header {
    /// Adds an array behind the others.
    pub(super) fn add(&mut self, name: &str, dtype: DType, shape: Vec<u64>) {
        let begin = self.arrays.last().map_or(0, |last| last.end);
        let end = begin + shape.iter().product::<u64>() * dtype.size() as u64;
        self.arrays.push(Array { name: name.to_owned(), dtype: dtype_name(dtype), shape, begin, end });
    }

    pub(super) fn find(&self, name: &str) -> Option<&Array> {
        self.arrays.iter().find(|array| array.name == name)
    }

    pub(super) fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// The header as bytes, its length in front, padded so that the arrays begin at a multiple of 8. Notes where they do.
    pub(super) fn write(&mut self) -> Vec<u8> {
        let mut parts = Vec::new();
        let metadata: Vec<String> = self.metadata.iter().map(|(k, v)| format!("{}:{}", quote(k), quote(v))).collect();
        parts.push(format!("\"__metadata__\":{{{}}}", metadata.join(",")));
        for Array { name, dtype, shape, begin, end } in &self.arrays {
            let name = quote(name);
            parts
                .push(format!("{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}"));
        }
        let mut json = format!("{{{}}}", parts.join(","));
        json.push_str(&" ".repeat(json.len().next_multiple_of(8) - json.len()));
        self.data = 8 + json.len() as u64;
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.into_bytes());
        bytes
    }

    /// Reads and checks a header: each array has the bytes that its shape says, and the file has all of them.
    ///
    /// # Errors
    /// Why it is none.
    pub(super) fn read(file: &mut File) -> Result<Header, String> {
        let io = |error: std::io::Error| error.to_string();
        let length = file.metadata().map_err(io)?.len();
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        let mut size = [0; 8];
        file.read_exact(&mut size).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                "it is shorter than the 8 bytes that every such file begins with".to_owned()
            }
            _ => format!("it cannot be read: {error}"),
        })?;
        let size = u64::from_le_bytes(size);
        if size > MOST_HEADER || size > length.saturating_sub(8) {
            return Err(format!("it has no header of {size} bytes"));
        }
        let mut json = vec![0; size as usize];
        file.read_exact(&mut json).map_err(io)?;
        let json = String::from_utf8(json).map_err(|_| "its header is no text".to_owned())?;
        let mut header = Header { data: 8 + size, ..Header::default() };
        let mut parser = Parser { rest: json.trim_end() };
        parser.object(|parser, name| match name.as_str() {
            "__metadata__" => parser.object(|parser, key| {
                let value = parser.string()?;
                header.metadata.push((key, value));
                Ok(())
            }),
            _ => {
                let array = parser.array(name)?;
                header.arrays.push(array);
                Ok(())
            }
        })?;
        if !parser.rest.is_empty() {
            return Err("its header goes on behind its end".to_owned());
        }
        for array in &header.arrays {
            let elements = array.shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
            let bytes = elements.zip(dtype_size(&array.dtype)).and_then(|(elements, size)| elements.checked_mul(size));
            let right = bytes.is_some() && array.end.checked_sub(array.begin) == bytes;
            if !right || array.end > length - header.data {
                return Err(format!("array `{}` is cut short, or not of its shape", array.name));
            }
        }
        Ok(header)
    }
}

fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if u32::from(c) < 0x20 => quoted.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

/// As much of JSON as such a header has: objects, strings, and lists of whole numbers.
struct Parser<'t> {
    rest: &'t str,
}

impl Parser<'_> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Whether the next character is this one, which is then taken.
    fn take(&mut self, c: char) -> bool {
        self.skip();
        let rest = self.rest.strip_prefix(c);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, c: char) -> Result<(), String> {
        if self.take(c) { Ok(()) } else { Err(format!("its header lacks a `{c}`")) }
    }

    fn object(&mut self, mut entry: impl FnMut(&mut Self, String) -> Result<(), String>) -> Result<(), String> {
        self.expect('{')?;
        if self.take('}') {
            return Ok(());
        }
        loop {
            let key = self.string()?;
            self.expect(':')?;
            entry(self, key)?;
            if !self.take(',') {
                return self.expect('}');
            }
        }
    }

    fn string(&mut self) -> Result<String, String> {
        self.expect('"')?;
        let (mut text, mut chars) = (String::new(), self.rest.char_indices());
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Ok(text);
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some(c @ ('"' | '\\' | '/')) => text.push(c),
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('u') => {
                        let code: String = chars.by_ref().take(4).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
                        text.push(code.ok_or("its header has a name that is none")?);
                    }
                    _ => return Err("its header has a name that is none".to_owned()),
                },
                c => text.push(c),
            }
        }
        Err("its header ends within a name".to_owned())
    }

    fn number(&mut self) -> Result<u64, String> {
        self.skip();
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        digits.parse().map_err(|_| "its header has a number that is none".to_owned())
    }

    fn numbers(&mut self) -> Result<Vec<u64>, String> {
        self.expect('[')?;
        let mut numbers = Vec::new();
        if self.take(']') {
            return Ok(numbers);
        }
        loop {
            numbers.push(self.number()?);
            if !self.take(',') {
                self.expect(']')?;
                return Ok(numbers);
            }
        }
    }

    fn array(&mut self, name: String) -> Result<Array, String> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        self.object(|parser, key| {
            match key.as_str() {
                "dtype" => dtype = Some(parser.string()?),
                "shape" => shape = Some(parser.numbers()?),
                "data_offsets" => offsets = Some(parser.numbers()?),
                other => return Err(format!("its header says `{other}` of an array")),
            }
            Ok(())
        })?;
        match (dtype, shape, offsets.as_deref()) {
            (Some(dtype), Some(shape), Some(&[begin, end])) => Ok(Array { name, dtype, shape, begin, end }),
            _ => Err(format!("its header does not say where array `{name}` lies")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(bytes: &[u8]) -> File {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pinring-container-{}-{number}", std::process::id()));
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn example() -> (Header, Vec<u8>) {
        let mut header = Header::default();
        header.metadata.push(("form\n".to_owned(), "a \"b\" \\ c".to_owned()));
        header.add("obs.frame", DType::U8, vec![3, 2]);
        header.add("reward", DType::F32, vec![3]);
        header.add("nothing", DType::F64, vec![0, 4]);
        let mut bytes = header.write();
        assert_eq!(bytes.len() % 8, 0);
        bytes.extend([7; 18]);
        (header, bytes)
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let (header, bytes) = example();
        assert_eq!(Header::read(&mut file(&bytes)).unwrap(), header);
        assert_eq!(header.find("reward").map(|array| (array.begin, array.end)), Some((6, 18)));
    }

    /// Cut anywhere, or with any byte of the header changed, it is refused or still a header; never a panic.
    #[test]
    fn what_is_no_container_is_refused() {
        let (_, bytes) = example();
        for end in 0..bytes.len() {
            assert!(Header::read(&mut file(&bytes[..end])).is_err(), "cut at {end}");
        }
        for at in 0..bytes.len() - 18 {
            let mut changed = bytes.clone();
            changed[at] = changed[at].wrapping_add(1);
            let _ = Header::read(&mut file(&changed));
        }
        for text in [
            "",
            "null",
            "{\"a\":1}",
            "{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551615,2],\"data_offsets\":[0,8]}}",
        ] {
            let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
            bytes.extend(text.as_bytes());
            assert!(Header::read(&mut file(&bytes)).is_err(), "{text}");
        }
    }
}
