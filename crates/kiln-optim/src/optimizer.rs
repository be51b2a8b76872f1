//! One step of all parameters of a module: they are taken out of it, put into batches, moved batch by batch
//! by the rule of their group, and put back.
//!
//! AdamW moves all parameters of a group together. A batch is what a rule wants that works on matrices of one shape, those
//! of one group; or one parameter that AdamW moves in its own element type.

use crate::AdamWConfig;
use crate::adamw;
use crate::groups::{GroupIndex, Groups, Settings};
use crate::masters::{Lower, Masters, Raise};
use crate::names::{Names, Naming};
use crate::rest::Rest;
use crate::rule::{self, Member, Pace};
use crate::state::{Load, Save, State, StateError};
use burn::module::{Module, ModuleMapper, Param, ParamGroup, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use kiln_ops::adamw::{AdamWBatch, AdamWMoved};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};

/// An optimizer over the parameters of a module, in groups; its state is kept by the name of the parameter.
///
/// One step count serves all parameters; one without a gradient is left as it is. By AdamW a parameter in 16 bits moves in
/// 16 bits, which loses small updates, unless the optimizer has its value in f32 ([`keep_masters`](Self::keep_masters)).
pub struct Optimizer {
    groups: Groups,
    state: State,
    masters: Masters,
    steps: u64,
    naming: Naming,
}

impl Optimizer {
    /// An optimizer that has taken no step, with these settings for every parameter that is in no group.
    pub fn new(default: impl Into<Settings>) -> Self {
        let groups = Groups::new(default.into());
        let (state, masters) = (State::default(), Masters::default());
        Self { groups, state, masters, steps: 0, naming: str::to_string }
    }

    /// Gives the parameters in `group` their own settings. Of several groups that hold a parameter the
    /// last counts. A group by path sees the names of the parameters.
    pub fn with_group(mut self, group: ParamGroup, settings: impl Into<Settings>) -> Self {
        self.groups.push(group, settings.into());
        self
    }

    /// Names parameters by something else than their path in the module, so that a saved state outlives a
    /// change of the module's fields. Two parameters must not get one name.
    pub fn with_names(self, naming: Naming) -> Self {
        Self { naming, ..self }
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The module with parameters in `dtype`, bf16 or f16, those of which `which` says so by name and rank, so that no
    /// forward casts them. The optimizer keeps their values in f32, moves those, and rounds them into the module as it
    /// does: they are the master weights of mixed precision.
    ///
    /// Only parameters in f32 that require a gradient become such; `dtype` f32 changes nothing. What somebody else writes
    /// into such a parameter in 16 bits is gone after the next step; a value in f32 takes the place of the master, and the
    /// parameter stays in f32 until it is named here again.
    ///
    /// Masters are no part of the [`state`](Self::state): save the module [`with_masters`](Self::with_masters). To go on
    /// from there put the record into a module in f32, load the state, and call this again.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{DType, Device, Tensor};
    /// use burn::{module::Module, nn::LinearConfig};
    /// use kiln_optim::prelude::*;
    ///
    /// let device = Device::flex().autodiff();
    /// let mut optimizer = AdamWConfig::new().init();
    /// let layer = LinearConfig::new(4, 2).with_bias(false).init(&device);
    /// // Norms and biases stay in f32.
    /// let mut layer = optimizer.keep_masters(layer, DType::BF16, |_path, rank| rank >= 2);
    ///
    /// let x = Tensor::<2>::ones([3, 4], &device).cast(DType::BF16);
    /// let loss = layer.forward(x).cast(DType::F32).square().mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &layer);
    /// layer = optimizer.step(layer, grads, 1e-3);
    /// assert_eq!(layer.weight.val().dtype(), DType::BF16);
    ///
    /// // Saved in f32, and gone on with.
    /// let state = optimizer.state(&layer).into_iter().collect();
    /// let record = optimizer.with_masters(&layer).into_record();
    /// let saved = LinearConfig::new(4, 2).with_bias(false).init(&device).load_record(record);
    /// let mut second = AdamWConfig::new().init();
    /// second.load_state(&saved, optimizer.steps(), state)?;
    /// let layer = second.keep_masters(saved, DType::BF16, |_path, rank| rank >= 2);
    /// # let _ = layer;
    /// # }
    /// # Ok::<(), kiln_optim::StateError>(())
    /// ```
    ///
    /// Source: Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740).
    ///
    /// # Panics
    ///
    /// If `dtype` is none of f32, bf16 and f16.
    pub fn keep_masters<M: Module>(
        &mut self,
        module: M,
        dtype: DType,
        which: impl Fn(&str, usize) -> bool,
    ) -> M {
        let known = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        assert!(known, "dtype = {dtype:?}, expected F32, BF16 or F16");
        if dtype == DType::F32 {
            return module;
        }
        let (names, masters) = (Names::new(self.naming), &mut self.masters);
        module.map(&mut Lower { names, masters, dtype, which })
    }

    /// The module with master weights in the place of what they are rounded to: to be saved, not to go on with.
    pub fn with_masters<M: Module>(&self, module: &M) -> M {
        let (names, masters) = (Names::new(self.naming), &self.masters);
        module.clone().map(&mut Raise { names, masters })
    }

    /// One step: the module with its parameters moved against their gradients.
    pub fn step<M: Module>(&mut self, module: M, grads: GradientsParams, learning_rate: f64) -> M {
        self.step_scaled(module, grads, learning_rate, None)
    }

    /// The same with all gradients multiplied by `scale`, `[1]`, on their device, such as a [`clip_scale`](crate::clip_scale): no pass
    /// over the gradients of its own.
    pub fn step_scaled<M: Module>(
        &mut self,
        module: M,
        grads: GradientsParams,
        learning_rate: f64,
        scale: Option<Tensor<1>>,
    ) -> M {
        let scale = scale.map(|scale| scale.inner().cast(DType::F32));
        self.steps += 1;
        let names = Names::new(self.naming);
        let pace = Pace { learning_rate, step: self.steps, scale };
        let mut gather = Gather {
            groups: &self.groups,
            state: &mut self.state,
            masters: &mut self.masters,
            pace: &pace,
            grads,
            names,
            by_adamw: vec![],
            batches: Batches::default(),
        };
        let module = module.map(&mut gather);
        let Gather { by_adamw, batches, .. } = gather;
        let count = by_adamw.iter().map(|of| of.rests.len()).sum::<usize>() + batches.list.len();
        let moved = HashMap::with_capacity(count);
        let mut done = Done { state: &mut self.state, masters: &mut self.masters, moved };
        for (group, batch) in batches.list {
            let settings = self.groups.settings(group);
            batch.step(settings, &settings.pace(&pace), &mut done);
        }
        for Together { of, rests, .. } in by_adamw {
            let mut stepped = of.step();
            for rest in rests {
                rest.part(&mut stepped, &mut done);
            }
        }
        module.map(&mut PutBack { moved: done.moved })
    }

    /// The state as data, such as AdamW's moments `<name>.first` and `<name>.second`.
    pub fn state<M: Module>(&self, module: &M) -> Vec<(String, TensorData)> {
        let names = Names::new(self.naming);
        let mut save = Save { groups: &self.groups, state: &self.state, names, saved: Vec::new() };
        module.visit(&mut save);
        save.saved
    }

    /// Takes a saved state in place of its own: the next step goes on as if it had never stopped.
    ///
    /// # Errors
    ///
    /// [`StateError`] if a tensor does not fit its parameter, lacks its twin or has no parameter.
    pub fn load_state<M: Module>(
        &mut self,
        module: &M,
        steps: u64,
        state: BTreeMap<String, TensorData>,
    ) -> Result<(), StateError> {
        let mut load = Load {
            groups: &self.groups,
            names: Names::new(self.naming),
            saved: state,
            state: State::default(),
            result: Ok(()),
        };
        module.visit(&mut load);
        load.result?;
        if let Some(name) = load.saved.into_keys().next() {
            return Err(StateError::Unknown(name));
        }
        (self.state, self.steps) = (load.state, steps);
        Ok(())
    }
}

/// Parameters that AdamW moves at once, whatever their shapes: those of one group on one device.
struct Together {
    place: (GroupIndex, Device),
    of: AdamWBatch,
    rests: Vec<Box<dyn AnyRest>>,
}

/// The other parameters that were taken out of the module.
#[derive(Default)]
struct Batches {
    /// In the order in which the walk met them.
    list: Vec<(GroupIndex, Box<dyn AnyBatch>)>,
    index: HashMap<(GroupIndex, Shape), usize>,
}

impl Batches {
    /// Beside those of its group and shape, if they are `joined`; else in a batch of its own.
    fn push<const D: usize>(
        &mut self,
        (group, joined): (GroupIndex, bool),
        shape: Shape,
        member: Member<D>,
        rest: Rest<D>,
    ) {
        let new = self.list.len();
        let index = match joined {
            true => *self.index.entry((group, shape)).or_insert(new),
            false => new,
        };
        if index == new {
            self.list.push((group, Box::new(Batch::<D> { members: vec![], rest: vec![] })));
        }
        let batch = self.list[index].1.as_any().downcast_mut::<Batch<D>>();
        let batch = batch.expect("one shape has one rank");
        batch.members.push(member);
        batch.rest.push(rest);
    }
}

impl<const D: usize> Rest<D> {
    /// `what` are the names of the state.
    fn done(mut self, of: rule::Moved<D>, what: &'static [&'static str], to: &mut Done) {
        let name = std::mem::take(&mut self.name);
        let value = match of.copy {
            Some(copy) => {
                to.masters.put(name.clone(), of.value);
                copy
            }
            None => of.value,
        };
        to.state.put(name, what, of.state);
        to.moved.insert(self.id, Box::new(self.with(value)));
    }
}

/// Where everything goes after a step.
struct Done<'a> {
    state: &'a mut State,
    masters: &'a mut Masters,
    moved: Moved,
}

/// Parameters of one group and one shape, or one.
struct Batch<const D: usize> {
    members: Vec<Member<D>>,
    rest: Vec<Rest<D>>,
}

/// Parameters by id, each a `Param<Tensor<D>>` of its own rank.
type Moved = HashMap<ParamId, Box<dyn Any>>;

/// A batch of any rank.
trait AnyBatch {
    fn as_any(&mut self) -> &mut dyn Any;

    fn step(self: Box<Self>, settings: &Settings, pace: &Pace, to: &mut Done);
}

impl<const D: usize> AnyBatch for Batch<D> {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn step(self: Box<Self>, settings: &Settings, pace: &Pace, to: &mut Done) {
        let Self { members, rest } = *self;
        let moved = settings.rule.step(members, pace);
        for (moved, rest) in moved.into_iter().zip(rest) {
            rest.done(moved, settings.rule.state(D), to);
        }
    }
}

/// What a parameter that AdamW moves with others is beside its value.
trait AnyRest {
    /// Takes the next one that moved.
    fn part(self: Box<Self>, stepped: &mut AdamWMoved, to: &mut Done);
}

impl<const D: usize> AnyRest for Rest<D> {
    fn part(self: Box<Self>, stepped: &mut AdamWMoved, to: &mut Done) {
        let moved = stepped.take::<D>().expect("all that joined come back");
        self.done(adamw::moved(moved), AdamWConfig::STATE, to);
    }
}

/// Takes every parameter with a gradient out of the module, so that nothing else holds its memory while it
/// moves.
struct Gather<'a> {
    groups: &'a Groups,
    state: &'a mut State,
    masters: &'a mut Masters,
    pace: &'a Pace,
    grads: GradientsParams,
    names: Names,
    by_adamw: Vec<Together>,
    batches: Batches,
}

impl Gather<'_> {
    /// Those that AdamW moves at once with a parameter of a group.
    fn together(
        &mut self,
        group: GroupIndex,
        config: &AdamWConfig,
        device: &Device,
    ) -> &mut Together {
        let known = |of: &Together| of.place.0 == group && of.place.1 == *device;
        let at = self.by_adamw.iter().position(known).unwrap_or_else(|| {
            let of = config.batch(&self.groups.settings(group).pace(self.pace));
            let place = (group, device.clone());
            self.by_adamw.push(Together { place, of, rests: vec![] });
            self.by_adamw.len() - 1
        });
        &mut self.by_adamw[at]
    }
}

impl ModuleMapper for Gather<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return param;
        };
        let name = self.names.name();
        let group = self.groups.of(&param.id, &name);
        let groups = self.groups;
        let rule = &groups.settings(group).rule;
        let state = self.state.take(&name, rule.state(D));
        let (id, shape, device) = (param.id, param.lazy_shape(), param.lazy_device());
        let (rest, value) = Rest::of(param, name);
        // One in f32 is not what the optimizer rounded: somebody put it there, and it counts.
        let (value, copy) = match self.masters.take(&rest.name) {
            Some(master) if value.dtype() != DType::F32 => (master, Some(value)),
            _ => (value, None),
        };
        let own = value.dtype() != DType::F32;
        let member = Member { value, copy, grad, state };
        match rule.adamw(D) {
            Some(config) if !own => {
                let (of, grad) = adamw::moving(member);
                let together = self.together(group, config, &device);
                together.of.push(of, grad).unwrap_or_else(|error| panic!("{error}"));
                together.rests.push(Box::new(rest));
            }
            adamw => self.batches.push((group, adamw.is_none()), shape.clone(), member, rest),
        }
        let taken = |_: &_, _| unreachable!("a parameter is put back before anybody looks at it");
        Param::uninitialized(id, taken, device, true, shape)
    }
}

/// Puts them back.
struct PutBack {
    moved: Moved,
}

impl ModuleMapper for PutBack {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.moved.remove(&param.id) {
            Some(moved) => *moved.downcast().expect("the parameter has the rank it had"),
            None => param,
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::rule::Rule;

    /// Two matrices of one shape with one of another between them, and a third that stands in a group.
    #[derive(Module, Debug)]
    struct Matrices {
        first: Param<Tensor<2>>,
        other: Param<Tensor<2>>,
        second: Param<Tensor<2>>,
        apart: Param<Tensor<2>>,
    }

    impl Matrices {
        fn each(&self) -> [&Param<Tensor<2>>; 4] {
            [&self.first, &self.other, &self.second, &self.apart]
        }
    }

    #[test]
    fn a_rule_that_joins_gets_those_of_one_group_and_shape_in_their_order() {
        let device = Device::flex();
        let matrix = |shape: [usize; 2], value: f64| {
            let full = Tensor::<2>::full(shape, value, &device);
            Param::initialized(ParamId::new(), full.autodiff().require_grad())
        };
        let mut module = Matrices {
            first: matrix([2, 3], 1.0),
            other: matrix([3, 2], 2.0),
            second: matrix([2, 3], 3.0),
            apart: matrix([2, 3], 4.0),
        };
        let settings = Settings { rule: Rule::Together, learning_rate_scale: 1.0 };
        let apart = settings.clone().with_learning_rate_scale(10.0);
        let mut optimizer =
            Optimizer::new(settings).with_group(ParamGroup::from_ids(vec![module.apart.id]), apart);
        for _ in 0..2 {
            // Gradients 1, 2, 3 and 4.
            let losses = module.each().into_iter().zip(1..);
            let loss = losses.map(|(param, factor)| (param.val() * factor).sum());
            let loss = loss.reduce(|sum, of| sum + of).unwrap();
            let grads = GradientsParams::from_grads(loss.backward(), &module);
            module = optimizer.step(module, grads, 0.5);
        }
        // The first two of one shape move by the mean of 1 and 3, the others by their own gradients.
        let expected = [1.0 - 2.0, 2.0 - 2.0, 3.0 - 2.0, 4.0 - 40.0];
        for (param, expected) in module.each().into_iter().zip(expected) {
            let found: Vec<f32> = param.val().into_data().iter::<f32>().collect();
            assert_eq!(found, vec![expected; 6]);
        }
        let state = optimizer.state(&module);
        let names: Vec<&str> = state.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["first.steps", "other.steps", "second.steps", "apart.steps"]);
        for ((name, steps), param) in state.iter().zip(module.each()) {
            assert_eq!(steps.num_elements(), param.val().shape().num_elements(), "{name}");
            assert!(steps.iter::<f32>().all(|steps| steps == 2.0), "{name}");
        }
    }
}
