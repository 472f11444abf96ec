//! Arguments other than tokens, with errors that name them.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyString};

/// The name of an object's type.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

/// A whole number in `least..=most`.
pub(crate) fn number<T>(name: &str, object: &Bound<'_, PyAny>, least: T, most: T) -> PyResult<T>
where
    T: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr> + PartialOrd + std::fmt::Display + Copy,
{
    let refuse = || PyValueError::new_err(format!("{name} must be {least} to {most}, not {object}"));
    if object.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{name} must be an int, not bool")));
    }
    match object.extract::<T>() {
        Ok(number) if (&least..=&most).contains(&&number) => Ok(number),
        Ok(_) => Err(refuse()),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Err(refuse()),
        Err(_) => Err(PyTypeError::new_err(format!("{name} must be an int, not {}", type_name(object)))),
    }
}

/// Bytes that stay where they are while the GIL is released.
pub(crate) fn bytes(name: impl std::fmt::Display, object: &Bound<'_, PyAny>) -> PyResult<PyBackedBytes> {
    match object.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.clone().into()),
        Err(_) => Err(PyTypeError::new_err(format!("{name} must be bytes, not {}", type_name(object)))),
    }
}

/// A sequence of bytes.
pub(crate) fn chunk_hashes(object: &Bound<'_, PyAny>) -> PyResult<Vec<PyBackedBytes>> {
    let single = object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyByteArray>()
        || object.is_instance_of::<PyString>();
    let refuse =
        || PyTypeError::new_err(format!("chunk_hashes must be a sequence of bytes, not {}", type_name(object)));
    if single {
        return Err(refuse());
    }
    let items = object.try_iter().map_err(|_| refuse())?;
    items.enumerate().map(|(index, item)| bytes(format_args!("chunk_hashes[{index}]"), &item?)).collect()
}
