//! Token sequences as they come from Python, as a slice of `u32`.

use numpy::{PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyTuple};

use crate::arguments::type_name;
use crate::plain_ints;

/// Tokens of one call, read in place where they lie as 32-bit integers.
pub(crate) enum Tokens<'py> {
    Owned(Vec<u32>),
    Unsigned(PyReadonlyArray1<'py, u32>),
    Signed(PyReadonlyArray1<'py, i32>),
}

impl<'py> Tokens<'py> {
    /// Reads `tokens` in any form that the Python documentation names.
    pub(crate) fn from_python(tokens: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = tokens.cast::<PyList>() {
            let mut read = Vec::with_capacity(list.len());
            plain_ints::from_list(list, &mut read);
            return read_rest(tokens, read).map(Self::Owned);
        }
        if let Ok(tuple) = tokens.cast::<PyTuple>() {
            let mut read = Vec::with_capacity(tuple.len());
            plain_ints::from_tuple(tuple, &mut read);
            return read_rest(tokens, read).map(Self::Owned);
        }
        let py = tokens.py();
        let array = py.import("numpy")?.call_method1("asarray", (tokens,)).map_err(|error| {
            // What refused may be torch, whose message speaks of its own affairs.
            let named = PyTypeError::new_err(format!("tokens must be readable as an array: {}", error.value(py)));
            named.set_cause(py, Some(error));
            named
        })?;
        let array = array.cast_into::<PyUntypedArray>()?;
        if array.ndim() != 1 {
            let message = format!("tokens must be one-dimensional, not {}-dimensional", array.ndim());
            return Err(PyValueError::new_err(message));
        }
        if array.is_empty() {
            return Ok(Self::Owned(Vec::new()));
        }
        let kind = array.dtype().kind();
        if !matches!(kind, b'i' | b'u') {
            return Err(PyTypeError::new_err(format!("tokens must hold integers, not {}", array.dtype())));
        }
        // In place if it lies there as a slice does: contiguous and aligned.
        if let Ok(array) = array.cast::<PyArray1<u32>>() {
            let array = array.try_readonly()?;
            if array.as_slice().is_ok() {
                return Ok(Self::Unsigned(array));
            }
        } else if let Ok(array) = array.cast::<PyArray1<i32>>() {
            let array = array.try_readonly()?;
            if let Ok(tokens) = array.as_slice() {
                return match tokens.iter().position(|&token| token < 0) {
                    None => Ok(Self::Signed(array)),
                    Some(index) => Err(negative(index, tokens[index])),
                };
            }
        }
        // Any others by way of the widest of their kind, in native byte order.
        if kind == b'u' {
            let wide = array.call_method1("astype", ("uint64",))?.cast_into::<PyArray1<u64>>()?;
            return narrow(wide.readonly().as_slice()?).map(Self::Owned);
        }
        let wide = array.call_method1("astype", ("int64",))?.cast_into::<PyArray1<i64>>()?;
        narrow(wide.readonly().as_slice()?).map(Self::Owned)
    }

    pub(crate) fn as_slice(&self) -> PyResult<&[u32]> {
        Ok(match self {
            Self::Owned(tokens) => tokens,
            Self::Unsigned(array) => array.as_slice()?,
            // Non-negative: checked when it came in.
            Self::Signed(array) => bytemuck::cast_slice(array.as_slice()?),
        })
    }
}

fn negative(index: usize, token: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("tokens[{index}] is negative: {token}"))
}

fn narrow<T: Copy + std::fmt::Display + PartialOrd + Default + TryInto<u32>>(wide: &[T]) -> PyResult<Vec<u32>> {
    let check = |(index, &token): (usize, &T)| {
        token.try_into().map_err(|_| {
            if token < T::default() {
                negative(index, token)
            } else {
                PyValueError::new_err(format!("tokens[{index}] does not fit 32 bits: {token}"))
            }
        })
    };
    wide.iter().enumerate().map(check).collect()
}

/// Reads what the fast way left: a numpy scalar or an int subclass is as good as an int.
fn read_rest(items: &Bound<'_, PyAny>, mut tokens: Vec<u32>) -> PyResult<Vec<u32>> {
    // The length is asked for anew each time: the `__index__` of an item may change the list.
    while tokens.len() < items.len()? {
        let item = items.get_item(tokens.len())?;
        tokens.push(read_item(tokens.len(), &item)?);
    }
    Ok(tokens)
}

fn read_item(index: usize, item: &Bound<'_, PyAny>) -> PyResult<u32> {
    if item.is_instance_of::<PyBool>() || !item.hasattr("__index__")? {
        return Err(PyTypeError::new_err(format!("tokens[{index}] must be an int, not {}", type_name(item))));
    }
    item.extract::<u32>().map_err(|error| {
        if !error.is_instance_of::<PyOverflowError>(item.py()) {
            // Raised by the item itself.
            error
        } else if item.lt(0).unwrap_or(false) {
            negative(index, item)
        } else {
            PyValueError::new_err(format!("tokens[{index}] does not fit 32 bits: {item}"))
        }
    })
}
