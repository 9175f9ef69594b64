//! The policy as burn sees it: the same perceptrons as modules with gradients.
//!
//! Owns the way from plain numbers ([`Mlp`]) to burn's parameters and back, the way of a batch's columns to tensors, and
//! the clipping of gradients. What it does not do: a loss, or a step (see [`crate::appo`]).

use crate::net::{Dense, Mlp, Policy};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::activation::tanh;
use burn::tensor::{AllocationProperty, Bytes, DType, Device, Tensor, TensorData};
use pinring::{Column, Element, SharedBatch};

/// One perceptron.
#[derive(Module, Debug)]
pub struct Tower {
    layers: Vec<Linear>,
}

impl Tower {
    /// With the numbers of `mlp`.
    pub fn new(mlp: &Mlp, device: &Device) -> Tower {
        let layers = mlp.layers.iter().map(|dense| {
            let weight = TensorData::new(dense.weight.clone(), [dense.inputs(), dense.outputs()]);
            let bias = TensorData::new(dense.bias.clone(), [dense.outputs()]);
            Linear { weight: Param::from_data(weight, device), bias: Some(Param::from_data(bias, device)) }
        });
        Tower { layers: layers.collect() }
    }

    /// Over the last axis.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (last, hidden) = self.layers.split_last().expect("a tower has layers");
        last.forward(hidden.iter().fold(input, |x, layer| tanh(layer.forward(x))))
    }

    /// As plain numbers.
    pub fn numbers(&self) -> Mlp {
        let layers = self.layers.iter().map(|layer| Dense {
            weight: floats(layer.weight.val()),
            bias: layer.bias.as_ref().map(|bias| floats(bias.val())).unwrap_or_default(),
        });
        Mlp { layers: layers.collect() }
    }
}

/// Actor and critic.
#[derive(Module, Debug)]
pub(crate) struct Networks {
    pub(crate) actor: Tower,
    pub(crate) critic: Tower,
}

impl Networks {
    /// With the numbers of `policy`.
    pub(crate) fn new(policy: &Policy, device: &Device) -> Networks {
        Networks { actor: Tower::new(&policy.actor, device), critic: Tower::new(&policy.critic, device) }
    }

    /// As plain numbers.
    pub(crate) fn policy(&self) -> Policy {
        Policy { actor: self.actor.numbers(), critic: self.critic.numbers() }
    }

    pub(crate) fn towers(&self) -> [&Tower; 2] {
        [&self.actor, &self.critic]
    }
}

/// A tensor's numbers, row-major.
pub fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("the learner computes in f32")
}

/// A column as a tensor over the slot's own bytes: no copy, and the slot comes home when the last tensor is gone.
pub fn import<T: Element, const D: usize, K>(
    shared: &SharedBatch,
    column: Column<T>,
    dtype: DType,
    property: AllocationProperty,
    device: &Device,
) -> Tensor<D, K>
where
    K: burn::tensor::kind::Basic,
{
    let (bytes, shape) = shared.column(column);
    let bytes = Bytes::from_shared(bytes::Bytes::from_owner(bytes), property);
    Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), device)
}

/// Clips by the norm of all gradients together, as one vector; burn's own clipping goes tensor by tensor.
pub fn clip(gradients: &mut GradientsParams, towers: &[&Tower], max: f32) {
    let layers = || towers.iter().flat_map(|tower| &tower.layers);
    let mut squares = 0.0;
    for layer in layers() {
        let parts = [
            gradients.get::<2>(layer.weight.id).map(|g| g.powi_scalar(2).sum()),
            layer.bias.as_ref().and_then(|bias| gradients.get::<1>(bias.id)).map(|g| g.powi_scalar(2).sum()),
        ];
        squares += parts.into_iter().flatten().map(|sum| sum.into_scalar::<f32>()).sum::<f32>();
    }
    let norm = squares.sqrt();
    if norm <= max {
        return;
    }
    for layer in layers() {
        if let Some(gradient) = gradients.remove::<2>(layer.weight.id) {
            gradients.register(layer.weight.id, gradient * (max / norm));
        }
        if let Some(bias) = &layer.bias
            && let Some(gradient) = gradients.remove::<1>(bias.id)
        {
            gradients.register(bias.id, gradient * (max / norm));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Scratch;

    #[test]
    fn numbers_survive_the_way_through_burn() {
        let policy = Policy::new(16, 3);
        let networks = Networks::new(&policy, &Device::flex().autodiff());
        assert_eq!(networks.policy(), policy);
    }

    #[test]
    fn both_forward_passes_agree() {
        let (policy, device) = (Policy::new(64, 5), Device::flex().autodiff());
        let networks = Networks::new(&policy, &device);
        let input = [0.3f32, -1.2, 0.05, 2.0];
        let batch = || Tensor::<2>::from_data(TensorData::new(input.to_vec(), [1, 4]), &device);
        let (logits, value) = (floats(networks.actor.forward(batch())), floats(networks.critic.forward(batch())));
        let mut scratch = Scratch::default();
        for (a, b) in policy.actor.forward(&input, &mut scratch).iter().zip(logits) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
        assert!((policy.value(&input, &mut scratch) - value[0]).abs() < 1e-5);
    }

    fn bias(layer: &Linear) -> &Param<Tensor<1>> {
        layer.bias.as_ref().expect("every layer has a bias")
    }

    /// A loss that is the sum of everything has a gradient of ones, whose length is the root of the parameters' number.
    #[test]
    fn gradients_are_clipped_by_their_common_norm() {
        let policy = Policy::new(16, 3);
        let networks = Networks::new(&policy, &Device::flex().autodiff());
        let count: usize = [&policy.actor, &policy.critic]
            .iter()
            .flat_map(|mlp| &mlp.layers)
            .map(|layer| layer.weight.len() + layer.bias.len())
            .sum();
        for (max, expected) in [(0.5, 0.5 / (count as f32).sqrt()), (1e3, 1.0)] {
            let layers = || networks.towers().into_iter().flat_map(|tower| &tower.layers);
            let terms = layers().map(|layer| layer.weight.val().sum() + bias(layer).val().sum());
            let sum = terms.reduce(|a, b| a + b).expect("there are layers");
            let mut gradients = GradientsParams::from_grads(sum.backward(), &networks);
            clip(&mut gradients, &networks.towers(), max);
            for layer in layers() {
                let all =
                    [gradients.get::<2>(layer.weight.id).map(floats), gradients.get::<1>(bias(layer).id).map(floats)];
                for gradient in all.into_iter().flat_map(|g| g.expect("a gradient for every parameter")) {
                    assert!((gradient - expected).abs() < 1e-6 * expected.max(1.0), "{gradient} is not {expected}");
                }
            }
        }
    }
}
