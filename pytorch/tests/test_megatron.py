"""Stowage around the forward-backward functions of Megatron-LM. SPEC S6.4."""

import unittest
from unittest import mock

from common import same, stowage, torch

import frameworks
from integrations import EVERY, OPTIONS, Broken, Case, Data, Net, under_way
from stowage.integrations import megatron


class Megatron(Case):
    def setUp(self):
        super().setUp()
        self.forward_backward = frameworks.forward_backward(self)
        begin = stowage.Runtime.step
        patch = mock.patch.object(stowage.Runtime, "step", lambda rt, key="": self.keys.append(key) or begin(rt, key))
        patch.start()
        self.addCleanup(patch.stop)

    def call(self, function, net, n=EVERY, **more):
        def forward_step(data, model):
            batch = next(data)
            return model(**batch)["loss"], lambda loss: (loss, {"loss": loss.detach()})

        data = iter(torch.utils.data.DataLoader(Data(2 * n), batch_size=2))
        return function(forward_step_func=forward_step, data_iterator=data, model=[net], num_microbatches=n, seq_length=8, micro_batch_size=2, **more)

    def gradients(self, net):
        return [p.grad for p in net.parameters()]

    def test_same_gradients(self):
        plain, net = frameworks.megatron_model(Net()), frameworks.megatron_model(Net())
        with stowage.Runtime(**OPTIONS) as rt:
            net.runtime = lambda: rt
            function = megatron.wrap(self.forward_backward, rt)
            for n in (EVERY, EVERY, 2):
                a, b = self.call(self.forward_backward, plain, n), self.call(function, net, n)
                self.assertEqual(n, len(a))
                for x, y in zip(a, b):
                    self.assertTrue(same(x["loss"], y["loss"]))
                for x, y in zip(self.gradients(plain), self.gradients(net)):
                    self.assertTrue(same(x, y))
            self.assertEqual(["4 of 2 x 8", "4 of 2 x 8", "2 of 2 x 8"], self.keys)
            self.assertEqual(1, len(rt._attached))
            self.assertGreater(rt.stats()["summary"]["counts"]["OutBytes"], 0)

    def test_evaluation_passes_through(self):
        net = frameworks.megatron_model(Net())
        with stowage.Runtime(**OPTIONS) as rt:
            net.runtime = lambda: rt
            self.call(megatron.wrap(self.forward_backward, rt), net.eval(), forward_only=True)
            self.assertEqual(([False] * EVERY, [], []), (net.in_steps, self.keys, rt._attached))

    def test_exceptions(self):
        net = frameworks.megatron_model(Net(breaks=3))
        with stowage.Runtime(**OPTIONS) as rt:
            function = megatron.wrap(self.forward_backward, rt)
            with self.assertRaises(Broken):
                self.call(function, net)
            self.assertFalse(under_way(rt))
            self.call(function, net)

    def test_key(self):
        with stowage.Runtime(**OPTIONS) as rt:
            function = megatron.wrap(self.forward_backward, rt, groups={"*mlp": "mlp"})
            self.call(function, frameworks.megatron_model(Net()), decoder_seq_length=3)
            self.assertEqual(["4 of 2 x 8, 3"], self.keys)

    def test_wrong_use(self):
        with stowage.Runtime(**OPTIONS) as rt:
            with self.assertRaisesRegex(stowage.Error, "get_forward_backward_func"):
                megatron.wrap(None, rt)
            with self.assertRaisesRegex(stowage.Error, "expected a stowage.Runtime"):
                megatron.wrap(self.forward_backward, Net())
            with self.assertRaisesRegex(stowage.Error, "FullCudaGraphWrapper"):
                megatron.wrap(type("FullCudaGraphWrapper", (), {"__call__": print})(), rt)
            with self.assertRaisesRegex(stowage.Error, "without num_microbatches="):
                megatron.wrap(self.forward_backward, rt)(model=[Net()])


if __name__ == "__main__":
    unittest.main()
